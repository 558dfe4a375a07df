"""Any strategy's checkpoint at any number of replicas, restored by any other: weights and optimizer state, bit for bit.

The writers' own exports and checkpoints are compared with plain PyTorch (the walkthrough does it in full); a reader's
with the writer's. `make test` does it for a ring of strategies, .ci/run for a ring of all, `make conformance` for all
pairs.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from tests.walkthrough.strategies import WAYS, processes, spec
from torch import Tensor

pytestmark = pytest.mark.timeout(900)
WRITERS = [("", 1), ("", 2), *((name, way.worlds[0]) for name, way in WAYS.items())]
READERS = [("", 1), ("", 3), *((name, way.worlds[min(1, len(way.worlds) - 1)]) for name, way in WAYS.items())]


def title(who: tuple[str, int]) -> str:
    return f"{who[0] or 'default'} on {who[1]}"


PAIRS = [(writer, reader) for writer in WRITERS for reader in READERS]
DAILY = [k for k, (name, _) in enumerate(WRITERS) if not name or WAYS[name].daily]
RING = [(WRITERS[k], READERS[after]) for k, after in pairwise([*DAILY, DAILY[0]])]
RING_OF_ALL = [(writer, READERS[(k + 2) % len(READERS)]) for k, writer in enumerate(WRITERS)]


def marks(pair: tuple[tuple[str, int], tuple[str, int]]) -> Any:
    if pair in RING:
        return []
    return pytest.mark.conformance if pair in RING_OF_ALL else pytest.mark.full


def launch(what: str, folder: Path, whom: dict[tuple[str, int], list[tuple[str, int]]]) -> None:
    """Those of one number of processes together. whom: who -> the writers that it reads."""
    for size in sorted({processes(*who) for who in whom}):
        members = [
            [title(who), spec(*who) or "", list(map(title, whom[who]))] for who in whom if processes(*who) == size
        ]
        plan = folder / f"{what}.{size}.json"
        plan.write_text(json.dumps(members))
        with contextlib.suppress(AssertionError):  # what went wrong is in the files that the processes wrote
            run_ranks(size, "tests.matrix.worker:main", what, str(folder), str(plan), deadline=400)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes and reads what the selected tests need."""
    at = tmp_path_factory.mktemp("matrix")
    needed: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for item in request.session.items:
        pair: Any = getattr(getattr(item, "callspec", None), "params", {}).get("pair")
        if pair is not None:
            needed[pair[1]].append(pair[0])
    launch("save", at, {writer: [] for writers in needed.values() for writer in writers})
    launch("read", at, needed)
    return at


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of model and optimizer, put together from the files by what is documented of their format."""
    (newest,) = [path for path in checkpoint.iterdir() if path.name.startswith("step-")]
    found = {
        f"{part}/{key}": value
        for part in ("model_0", "optimizer_0")
        if (file := newest / f"{part}.safetensors").exists()
        for key, value in load_file(file).items()
    }
    for index in sorted(newest.glob("slices-*.json")):
        file = index.with_suffix(".safetensors")
        blocks = load_file(file) if file.exists() else {}
        for key, one in json.loads(index.read_text())["tensors"].items():
            whole = found.setdefault(key, torch.full(one["shape"], torch.nan, dtype=getattr(torch, one["dtype"])))
            for number, (offset, shape) in enumerate(one["blocks"]):
                whole[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))] = blocks[f"{number}/{key}"]
    return found


def scalars(checkpoint: Path) -> Any:
    (newest,) = [path for path in checkpoint.iterdir() if path.name.startswith("step-")]
    return json.loads((newest / "optimizer_0.json").read_text())


@pytest.mark.conformance
@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=f"{title(pair[0])} read by {title(pair[1])}", marks=marks(pair)) for pair in PAIRS],
)
def test_reads(pair: tuple[tuple[str, int], tuple[str, int]], folder: Path) -> None:
    writer, reader = pair
    errors = [
        path.read_text()
        for who, what in ((writer, "save"), (reader, "read"))
        for path in folder.glob(f"{title(who)}.{what}.*.error")
    ]
    written, read = folder / title(writer), folder / f"{title(reader)} of {title(writer)}"
    assert read.exists(), "\n".join(errors) or "the launch failed"
    both = tensors(read), tensors(written)
    exports = [load_file(at / "export.safetensors") for at in (read, written)]
    assert len(exports[1]) == 6
    for ours, theirs in (both, exports):
        assert ours.keys() == theirs.keys()
        assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert scalars(read) == scalars(written)
