"""Every strategy runs with one process and one device, as `single` does, and says so in one line."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.strategies import checks

from paceline.config import parse_strategy
from paceline.errors import SettingError
from paceline.strategies import STRATEGIES, alone, check, on_cpu

LINES = {  # by strategy: what is said at the start
    "ddp": "strategy ddp trains like 'single', since this run has one process.",
    "data_parallel": "strategy data_parallel trains like 'single', since this run has one device.",
    "shared": "strategy shared trains like 'single', since this run has one process.",
    "fsdp": "strategy fsdp shards nothing here, since this run has one process.",
    "mirrored": "strategy mirrored trains like 'single', since this run has one device.",
    "tensor": "strategy tensor trains like 'single', since this run has one process.",
    "fsdp+tensor": "strategy fsdp+tensor shards nothing here and runs as 'fsdp', since this run has one process.",
    "fsdp+ulysses": "strategy fsdp+ulysses splits nothing here and runs as 'fsdp', since this run has one process.",
    "ulysses": "strategy ulysses trains like 'single', since this run has one process.",
    "pipeline": "strategy pipeline trains like 'single', since this run has one process.",
    "local_sgd": "strategy local_sgd trains like 'single', since this run has one process.",
    "parameter_server": "strategy parameter_server trains like 'single', since this run has one process.",
}
LOOP = [
    *(name for name in STRATEGIES if name not in ("deepspeed", "diloco")),  # diloco's outer steps change the result
    "fsdp:stage=1", "fsdp:stage=2,offload=true", "fsdp:checkpointing=true,wrap=Sequential,min_params=0",
    "tensor:plan=trunk.0:column,trunk.3:row", "tensor:size=1", "ulysses:size=1", "parameter_server:mode=async",
    "central_storage:devices=cpu",
]  # fmt: skip
CLOSURE = ["single", "fsdp", "pipeline:stages=1,schedule=1f1b", "mirrored:reduction=ring", "data_parallel:devices=cpu"]
CASES = [(strategy, form) for form, of_form in (("loop", LOOP), ("closure", CLOSURE)) for strategy in of_form]


def train(strategy: str, form: str, folder: Path) -> None:
    """Two epochs, between which a run ends and another one goes on."""
    for epochs in (1, 2):
        with checks.started(strategy=strategy) as run:
            model, optimizer = run.prepare(*checks.make(checks.Net, True))
            loader = run.loader(checks.data(), global_batch=checks.BATCH, micro_batch=4, shuffle=True)
            assert run.restore(folder, missing_ok=True) == (epochs == 2)
            for _ in run.epochs(epochs):
                for batch in loader:
                    if form == "loop":
                        run.backward(checks.both_heads(model, batch))
                    else:
                        run.forward_backward(checks.both_heads, model, batch)
                    run.step(optimizer, max_grad_norm=1.0)
            run.save(folder)
            run.export(folder / "model.safetensors", model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[set[str]]]:
    """Where case i has left its files, and what it has said. In a process of its own: the process group that fsdp makes
    stays until the process exits."""
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.strategies.{Path(__file__).stem}", str(folder)], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [part.splitlines() for part in done.stderr.split("case\n")[1:]]
    return folder, [{line for line in lines if line.startswith("paceline: strategy ")} for lines in said]


@pytest.mark.conformance
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}-{form}" for name, form in CASES])
def test_it_trains_as_single_does(number: int, trained: tuple[Path, list[set[str]]]) -> None:
    (strategy, form), (folder, said) = CASES[number], trained
    found = load_file(folder / str(number) / "model.safetensors")
    expected = load_file(folder / str(CASES.index(("single", form))) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)
    name = strategy.partition(":")[0]
    assert said[number] == ({f"paceline: {LINES[name]}"} if name in LINES else set())


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_of_the_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_strategy(name)
    if name == "deepspeed":
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())  # as if it were installed
    check(spec, 1)
    assert on_cpu(spec, 1) == 0  # a server would compute on the CPU, and it is the only process
    assert alone(spec, 2, torch.device("cpu")) == (spec, "")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fsdp:replicate=2", "replicate=2: this run has 1 process. Start 4, or drop replicate"),
        ("fsdp+tensor:replicate=2", "replicate=2: this run has 1 process"),
        ("fsdp+tensor:size=2", "size=2: this run has 1 process. Start 2 processes, or drop size"),
        ("tensor:size=2", "size=2: this run has 1 process. Start 2 processes, or drop size"),
        ("pipeline:stages=3", "stages=3: this run has 1 process. Start 3 processes, or drop stages"),
        ("pipeline:cut=2", "cut=2: this run has 1 process"),
        ("parameter_server:servers=2", "servers=2: this run has 1 process. Start at least 3, or drop servers"),
        ("fsdp:stage=4", "stage=4"),
        ("tensor:plan=up:diagonal", "diagonal"),
        ("pipeline:schedule=gpipes", "Did you mean 'gpipe'"),
        ("data_parallel:devices=nowhere", "nowhere"),
    ],
)
def test_options_that_make_no_sense_there(spec: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        check(parse_strategy(spec), 1)


def test_a_reproducible_run(capfd: pytest.CaptureFixture[str]) -> None:
    """Several devices of one process add in one order; so does one."""
    with checks.started(strategy="data_parallel", reproducible=4) as run:
        assert run._strategy.plan.shards == 4
    assert LINES["data_parallel"] in capfd.readouterr().err
    with pytest.raises(SettingError, match="reproducible=4 with strategy='tensor'"):
        checks.started(strategy="tensor", reproducible=4).__enter__()


@pytest.mark.conformance
def test_the_launcher_starts_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paceline\nrun = paceline.start()\nprint(run._strategy.mesh.sizes)\nrun.close()\n")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "1", "--strategy", "fsdp:mixed=bf16", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "{'shard': 1}\n"), done.stderr
    assert LINES["fsdp"] in done.stderr


if __name__ == "__main__":
    for case, (strategy, form) in enumerate(CASES):
        print("case", file=sys.stderr, flush=True)
        train(strategy, form, Path(sys.argv[1]) / str(case))
