"""paceline doctor: each planted fault is found as what it is; nothing that changes the model on a healthy script."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.doctor.planted import FOREIGN, HEALTHY, IN_LIBRARIES, PLANTED, SCRIPTS, Planted

from paceline.cli import main
from paceline.doctor.doctor_command import diagnose
from paceline.doctor.findings import CAUSES, Finding
from paceline.observe.records import read_records
from paceline.world import DOCTOR

ROOT = Path(__file__).parents[2]
TOGETHER = Path(__file__).with_name("together.py")
CUT = {"no sampler", "no set_epoch", "padded sums", "clipped before unscaling",
       "unfrozen after DDP, and clipped", "the same size, another order",
       "Paceline: a metric of a shard", "metric of a set that was cut", "not divided",
       "all on the first device", "DDP fails on an unused layer", "dropped without no_sync",
       "a second term per rank", "timesteps and noise of one seed"}  # fmt: skip


def command(*args: str, cwd: Path, seconds: float = 90.0, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds
    )


def together(
    folder: Path, scripts: dict[str, str], failing: set[str], processes: int, bf16: bool
) -> dict[str, list[Finding]]:
    """What is found in each of the scripts (name -> text), which run in one launch."""
    for name, text in scripts.items():
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "script.py").write_text(text)
    options = ["--bf16"] if bf16 else []
    done = command(
        "run", "--nproc", str(processes), str(TOGETHER), str(folder / "runs"), *options, cwd=ROOT, seconds=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in scripts:
        errors = [path.read_text() for path in (folder / "runs" / name).glob("error-*")]
        assert not errors or name in failing, f"{name}: {errors[0]}"
    found = {}
    for name in scripts:
        run, found[name] = diagnose(str(folder / "runs" / name), processes)
        trouble = [(e["text"], e["at"]) for e in run.all_events("trouble")]
        assert not trouble, f"{name}: {trouble[:3]}"
    return found


def model_changing(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.cause, f.at, f.evidence) for f in found if CAUSES[f.cause].kind == "model"]


def check(planted: list[Planted], healthy: tuple[str, ...], folder: Path, processes: int, bf16: bool) -> None:
    scripts = {name.replace("/", " "): (SCRIPTS / f"{name}.py").read_text() for name in healthy}
    scripts |= {p.name: p.source() for p in planted}
    found = together(folder, scripts, {p.name for p in planted if p.fails}, processes, bf16)
    alarms = {name: model_changing(found[name.replace("/", " ")]) for name in healthy}
    problems = [f"{name}, healthy: {alarm}" for name, alarm in alarms.items() if alarm]
    for p in planted:
        causes = [f.cause for f in found[p.name]]
        others = [c for c, _, _ in model_changing(found[p.name]) if c not in (p.cause, *p.also)]
        if p.cause not in causes or others:
            problems.append(f"{p.name}: {p.cause} planted, found {[(f.cause, f.evidence) for f in found[p.name]]}")
        else:
            at = next(f.at for f in found[p.name] if f.cause == p.cause)
            if "script.py:" not in at:
                problems.append(f"{p.name}: no line of the script, but {at!r}")
            elif p.at not in (named := p.source().splitlines()[int(at.rpartition(":")[2]) - 1]):
                problems.append(f"{p.name}: the line {named!r}, and not that of {p.at!r}")
            beside = next(f.beside for f in found[p.name] if f.cause == p.cause)
            with_ = p.source().splitlines()[int(beside.rpartition(":")[2]) - 1] if beside else ""
            if p.beside not in with_:
                problems.append(f"{p.name}: with {with_!r}, and not with {p.beside!r}")
    assert not problems, "\n".join(problems)


def test_faults_are_found_and_twins_are_clean(tmp_path: Path) -> None:
    check(
        [p for p in PLANTED if p.name in CUT],
        ("imagenet", "with_paceline", "search", "tensor_parallel", "masked", "mixture", "diffusion"),
        tmp_path,
        2,
        False,
    )


LIBRARIES_IN_CI = ("torch", "accelerate")


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("processes", "bf16"),
    [
        pytest.param(2, False, id="2-fp32"),
        pytest.param(3, True, id="3-bf16", marks=pytest.mark.full),
        pytest.param(2, True, id="2-bf16", marks=pytest.mark.campaign),
        pytest.param(3, False, id="3-fp32", marks=pytest.mark.campaign),
    ],
)
def test_the_whole_table(processes: int, bf16: bool, tmp_path: Path) -> None:
    check([p for p in PLANTED if not p.hangs], HEALTHY, tmp_path, processes, bf16)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "library",
    [
        pytest.param(library, marks=pytest.mark.conformance if library in LIBRARIES_IN_CI else pytest.mark.full)
        for library in sorted(set(FOREIGN.values()))
    ],
)
def test_scripts_of_other_frameworks(library: str, tmp_path: Path) -> None:
    """transformers.Trainer, Accelerate, Lightning, FSDP, torchmetrics."""
    if importlib.util.find_spec(library) is None:  # to import it here would leave its threads in the tests' process
        pytest.skip(f"scripts for {library} need it")
    healthy = tuple(name for name, needs in FOREIGN.items() if needs == library)
    check([p for p in IN_LIBRARIES if p.twin in healthy and not p.hangs], healthy, tmp_path, 2, False)


def test_every_cause_is_planted() -> None:
    assert {p.cause for p in (*PLANTED, *IN_LIBRARIES)} == set(CAUSES)
    assert {p.twin for p in PLANTED} <= set(HEALTHY)
    assert {p.twin for p in IN_LIBRARIES} <= set(FOREIGN)
    # the lines to change are there, once
    assert all(compile(p.source(), p.name, "exec") for p in (*PLANTED, *IN_LIBRARIES))


def test_the_docs_name_every_finding() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    assert [cause for cause in CAUSES if f"`{cause}`" not in text] == []


def doctor(folder: Path, text: str, *options: str, processes: int = 2) -> tuple[Any, Any]:
    """(the command's end, what its JSON says)."""
    (folder / "script.py").write_text(text)
    done = command("doctor", "--nproc", str(processes), "--json", "found.json", *options, "script.py", cwd=folder)
    return done, json.loads((folder / "found.json").read_text())


def hanging(name: str, folder: Path, processes: int) -> None:
    p = next(p for p in (*PLANTED, *IN_LIBRARIES) if p.name == name)
    done, document = doctor(folder, p.source(), processes=processes)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [f["cause"] for f in document["findings"] if f["changes_model"]] == ["collectives"], done.stdout
    first = document["findings"][0]
    assert Path(first["file"]).name == "script.py"
    planted = next(new for _, new in p.lines if new).splitlines()
    assert p.source().splitlines()[first["line"] - 1].strip() in "\n".join(planted) or "train(" in planted[1]


@pytest.mark.conformance
def test_a_collective_of_one_rank_ends_the_run(tmp_path: Path) -> None:
    hanging("a call of rank 0", tmp_path, 2)


@pytest.mark.full
def test_a_call_of_paceline_on_one_rank_is_the_scripts_own_error(tmp_path: Path) -> None:
    """It hangs no longer: the run itself says both calls and lines."""
    text = (SCRIPTS / "with_paceline.py").read_text()
    call = "accuracy = run.ratio(right, count)"
    assert text.count(call) == 1
    text = text.replace(call, f"{call} if run.main else 0")
    done, _ = doctor(tmp_path, text)
    line = next(number for number, own in enumerate(text.splitlines(), 1) if call in own)
    assert done.returncode == 2
    assert f"rank 0: run.ratio, at script.py, line {line}; rank 1: the backward of a batch" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", [p.name for p in (*PLANTED, *IN_LIBRARIES) if p.hangs])
def test_collectives_that_do_not_match(name: str, tmp_path: Path) -> None:
    hanging(name, tmp_path, 3)


def test_the_command_on_a_healthy_script(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "imagenet.py", tmp_path / "script.py")
    done = command(
        "doctor", "--nproc", "2", "--steps", "12", "--json", "f.json", "script.py", "--epochs", "9", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "f.json").read_text())
    assert document["steps"] == 12
    assert document["exit_code"] == 0
    assert not [f for f in document["findings"] if f["changes_model"]]
    assert done.stdout.index("epoch 0:") < done.stdout.index("paceline doctor: watched 12 steps on 2 processes")
    assert not {"f.json", "script.py", "checkpoint.pt"} ^ {path.name for path in tmp_path.iterdir()}


def test_a_script_that_fails_shows_its_own_error(tmp_path: Path) -> None:
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\nraise ValueError('of its own')\n"
    done, document = doctor(tmp_path, text)
    assert done.returncode == 2
    assert "ValueError: of its own" in done.stderr
    assert "paceline/doctor" not in done.stderr
    assert "the script failed" in document["not_watched"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere.py"], "There is no script 'nowhere.py'"),
        (["--steps", "0", __file__], "--steps 0: give the number of optimizer steps"),
        (["--deadline", "0", __file__], "--deadline 0: give a number of seconds"),
        (["--nproc", "two", __file__], "--nproc two"),
        (["--json", "nowhere/found.json", __file__], "--json nowhere/found.json: the folder"),
    ],
    ids=["script", "steps", "deadline", "nproc", "json"],
)
def test_bad_arguments_are_refused(args: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *args])
    assert result.exit_code == 2
    assert said in result.output


FIRST = """from torch.nn.parallel import DistributedDataParallel
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model.module(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.conformance
def test_a_package_that_looks_for_torch_before_it_imports_it(tmp_path: Path) -> None:
    """As transformers, datasets, peft, accelerate and many others do."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import importlib.util\nfound = importlib.util.find_spec('torch')\n")
    indented = FIRST.replace("\n", "\n    ")
    (package / "__main__.py").write_text(f"def main():\n    {indented}\nmain()\n")
    done = command("doctor", "--nproc", "2", "--json", "found.json", "-m", "package", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["not_watched"] is None
    found = {f["cause"]: f for f in document["findings"] if f["changes_model"]}
    assert list(found) == ["past_ddp"]
    assert found["past_ddp"]["file"].endswith("__main__.py")


@pytest.mark.conformance
@pytest.mark.parametrize("library", ["transformers", "datasets", "peft", "accelerate", "lightning", "torchmetrics"])
def test_a_library_that_is_imported_first(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"it needs {library}")
    script = tmp_path / "script.py"
    script.write_text(f"import {library}\nimport torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)])\n")
    env = {**os.environ, DOCTOR: json.dumps({"directory": str(tmp_path), "steps": None})}
    worker = [sys.executable, "-m", "paceline.doctor.doctor_worker", "script", str(script)]
    done = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [e["at"] for e in read_records(str(tmp_path / "rank-0.jsonl")) if e["k"] == "optimizer"] == [
        [str(script), 3]
    ]


@pytest.mark.conformance
def test_torch_that_was_loaded_unseen_is_told(tmp_path: Path) -> None:
    """Without an import statement, after the script has taken out all finders but Python's own."""
    text = """import importlib, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
importlib.import_module("torch")
"""
    done, document = doctor(tmp_path, text)
    assert done.returncode == 2
    assert "imported torch in a way that doctor cannot see" in document["not_watched"]
    assert document["not_watched"] in done.stdout


ENDLESS = """import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model.module(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    print("stepped", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.full
def test_ctrl_c_ends_it_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDLESS)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    args = [sys.executable, "-m", "paceline", "doctor", "script.py"]
    process = subprocess.Popen(args, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    steps = (line for line in process.stdout if "stepped" in line)
    assert len(list(itertools.islice(steps, 20))) == 20
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; all ranks have ended" in err
    assert "Traceback" not in err
    assert "[past_ddp: changes the model]" in out


@pytest.mark.full
def test_a_deadline_ends_it_with_what_was_found(tmp_path: Path) -> None:
    done, document = doctor(tmp_path, ENDLESS, "--deadline", "25")
    assert done.returncode == 1, done.stderr
    assert "25 seconds have passed" in done.stderr
    assert [f["cause"] for f in document["findings"] if f["changes_model"]] == ["past_ddp"]
    assert document["not_watched"] is None
