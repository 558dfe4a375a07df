"""Restores a checkpoint again and again, each time after it was changed by somebody who can sign manifests, too:

    python hostile_checkpoints.py COUNT

writes a line of JSON for each change: what it was, and what came of it. A restore may take 10 s, and the process 4 GiB
more than it has at the start.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.state import manifest

SECONDS, MORE_BYTES = 10, 4 * 2**30
HARMLESS = "harmless"  # what a random change may also be: the state of another run
STRANGE = [
    *(None, True, -1, 0, 2**31, 2**63, -(2**70), 1e308, float("inf"), float("nan")),
    *("", "a", "\ud800", "../../x", "x" * 10**6, [], {}, [[]]),
    *({"$": "tensor", "name": "none"}, {"$": "unknown"}, {"$": []}, {"$": "int", "hex": "f" * 5000}),
    *({"$": "numpy", "dtype": "O", "shape": [1], "name": "a"}, {"$": "numpy.scalar", "dtype": "<f8", "hex": ""}),
    *({"$": "float", "hex": "00"}, {"$": "complex", "hex": "z"}, {"$": "bytes", "base64": "*"}),
    *({"$": "deque", "items": [], "maxlen": 2**70}, {"$": "torch.Size", "items": [-1]}),
    *({"$": "dict", "items": [[[], 1]]}, {"$": "set", "items": [{"$": "dict", "items": []}]}),
    *({"$": "torch.dtype", "name": "nn"}, {"$": "torch.device", "name": "moon"}),
]


class Tracked:
    """State of many types."""

    def __init__(self) -> None:
        self.state: Any = {
            "array": np.zeros((3, 4)),
            "scalar": np.float32(2),
            "image": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "wide": torch.zeros(3, dtype=torch.complex64),
            "text": np.array(["a", "bc"]),
            "some": (1, 2.5, {3, 4}, b"bytes", torch.float16, 10**30, float("inf")),
        }

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved(folder: Path) -> tuple[paceline.Run, Path]:
    """A run in mid-epoch, and its checkpoint."""
    run = paceline.start(seed=1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    run.track(extra=Tracked())
    for (x,) in run.loader(TensorDataset(torch.randn(40, 4)), global_batch=8):
        run.backward(model(x).square().mean())
        run.step(optimizer)
        if run.steps == 3:
            return run, run.save(folder)
    raise AssertionError("unreachable")


def sign(place: Path, **fields: Any) -> None:
    """A manifest that fits the files of `place`. fields: in place of its own."""
    document = json.loads((place / manifest.NAME).read_text())
    for name in document["files"]:
        with contextlib.suppress(OSError):
            data = (place / name).read_bytes()
            document["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sign_document(place, {**document, **fields})


def sign_document(place: Path, document: dict[str, Any]) -> None:
    document.pop("sha256", None)
    blank = json.dumps({**document, "sha256": "0" * 64}).encode()
    own = hashlib.sha256(blank).hexdigest().encode()
    head, _, tail = blank.rpartition(b"0" * 64)
    (place / manifest.NAME).write_bytes(head + own + tail)


# --- changes. Each says what it has done.


def another_kind(place: Path, draw: random.Random) -> str:
    file = draw.choice(sorted(place.iterdir()))
    kinds: dict[str, Callable[[], object]] = {
        "a pipe": lambda: os.mkfifo(file),
        "a link to a device without end": lambda: file.symlink_to("/dev/zero"),
        "a link to a copy outside": lambda: file.symlink_to(outside),
        "a directory": lambda: file.mkdir(),
        "a socket": lambda: socket.socket(socket.AF_UNIX).bind(os.path.relpath(file)),
        "a file of 8 TiB of zeros": lambda: (file.touch(), os.truncate(file, 8 * 2**40)),
        "nothing": lambda: None,
    }
    kind = draw.choice(list(kinds))
    outside = place.parent / f"outside {file.name}"
    file.rename(outside)
    kinds[kind]()
    return f"{file.name} is {kind}"


def another_manifest(place: Path, draw: random.Random) -> str:
    document = json.loads((place / manifest.NAME).read_text())
    key = draw.choice(["step", "serial", "format", "meta", "files", "file", "size", "sha256", "name", "lost", "alone"])
    value = draw.choice([one for one in STRANGE if one != "x" * 10**6])
    name = draw.choice(list(document["files"]))
    if key == "file":
        document["files"][name] = value
    elif key in ("size", "sha256"):
        document["files"][name][key] = value
    elif key == "name":
        document["files"][draw.choice(["../a.json", "/etc/passwd", "manifest.json", "a\0.json", "b.py"])] = document[
            "files"
        ].pop(name)
    elif key == "lost":
        del document["files"][name]
    elif key == "alone":
        document["files"] = {name: document["files"][name]}
    else:
        document[key] = {} if key == "files" and draw.random() < 0.5 else value
    sign_document(place, document)
    if key == "meta" or (key in ("step", "serial") and type(value) is int and 0 <= value < 2**63):
        return HARMLESS
    return f"manifest: {key} of {name}, {str(value)[:40]}"


def another_shape_of_manifest(place: Path, draw: random.Random) -> str:
    texts = {
        "empty": b"",
        "deep": b"[" * 10**5,
        "deep objects": b'{"a":' * 10**5,
        "no object": b"3",
        "long": b" " * (2**26 + 2),
        "no text": bytes(range(256)),
    }
    kind = draw.choice(list(texts))
    (place / manifest.NAME).write_bytes(texts[kind])
    return f"manifest: {kind}"


def another_node(place: Path, draw: random.Random) -> str:
    """Something strange at a random place of a document."""
    file = draw.choice(sorted(place.glob("*[!t].json")))  # not the manifest
    document = json.loads(file.read_text())
    nodes = list(containers(document))
    node = draw.choice(nodes) if nodes else document
    value = copy.deepcopy(draw.choice(STRANGE))
    if isinstance(node, dict) and node:
        key = draw.choice(list(node))
        node.pop(key) if draw.random() < 0.2 else node.update({key: value})
    elif isinstance(node, list) and node:
        node[draw.randrange(len(node))] = value
    else:
        document = value
    file.write_text(json.dumps(document))
    sign(place)
    return f"{file.name}: {str(value)[:40]}"


def containers(node: Any) -> Iterator[Any]:
    if isinstance(node, (dict, list)):
        yield node
        for item in list(node.values()) if isinstance(node, dict) else node[:20]:
            yield from containers(item)


def another_document(place: Path, draw: random.Random) -> str:
    file = draw.choice(sorted(place.glob("*[!t].json")))
    texts = {"deep": "[" * 10**5 + "]" * 10**5, "numbers": "1" * 10**5, "cut": file.read_text()[:-2], "nothing": ""}
    kind = draw.choice(list(texts))
    file.write_text(texts[kind])
    sign(place)
    return f"{file.name}: {kind}"


def another_size(place: Path, draw: random.Random) -> str:
    """Shapes and strides of tracked["extra"] that ask for memory, or for what is not there."""
    file = place / "tracked.json"
    document = json.loads(file.read_text())
    nodes = [node for node in containers(document) if isinstance(node, dict) and {"shape", "strides"} & node.keys()]
    node = draw.choice(nodes)
    key = "strides" if "strides" in node else "shape"
    value = draw.choice([[4096], [2**40, 2**20], [-1], [2**62], [1, 2, 3, 10**12], [0], [0, 0, 0, 0], "a", [1.5]])
    node[key] = value
    file.write_text(json.dumps(document))
    sign(place)
    return f"tracked.json: {key} {value}"


def another_length(place: Path, draw: random.Random) -> str:
    """A safetensors file of other bytes, signed."""
    file = draw.choice(sorted(place.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    how = draw.choice(["cut", "longer", "header", "length"])
    if how == "cut":
        data = data[: draw.randrange(len(data))]
    elif how == "longer":
        data += b"\0" * draw.randrange(1, 100)
    elif how == "header":
        data[draw.randrange(8, 60)] = draw.randrange(256)
    else:
        data[:8] = draw.choice([0, 1, 2**20, 2**40, 2**63]).to_bytes(8, "little")
    same = bytes(data) == file.read_bytes()
    file.write_bytes(data)
    sign(place)
    return HARMLESS if same else f"{file.name}: {how}"


CHANGES = {
    another_kind: True,  # whether it must be refused
    another_manifest: True,
    another_shape_of_manifest: True,
    another_document: True,
    another_node: False,
    another_size: True,
    another_length: False,
}


def main(count: int) -> None:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        run, place = saved(Path(folder, "checkpoints"))
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MORE_BYTES, resource.RLIM_INFINITY))
        for number in range(count):
            copied = Path(folder, f"{number}", place.name)
            shutil.copytree(place, copied)
            change = list(CHANGES)[number % len(CHANGES)]
            what = change(copied, draw)
            signal.alarm(SECONDS)
            error, said = "", ""
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run.restore(copied)
            except BaseException as raised:
                error, said = type(raised).__name__, str(raised)
            signal.alarm(0)
            must = CHANGES[change] and what != HARMLESS
            found = {"change": what, "must": must, "error": error, "said": said[:2000], "named": str(copied) in said}
            print(json.dumps(found), flush=True)
            shutil.rmtree(copied.parent)
            run.restore(place)
        run.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
