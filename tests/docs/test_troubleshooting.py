"""Snippets of docs/troubleshooting.md that need several processes do what the page says, and doctor points there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import free_port

from paceline.doctor.findings import CAUSES, Finding, text

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SNIPPET = re.compile(r"<!-- not run: test_troubleshooting runs it as (\w+) -->\n```python\n(.*?)^```$", re.M | re.S)
TORCHRUN = ("-m", "torch.distributed.run")
TWO = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")


def slug(heading: str) -> str:
    """The anchor that the site gives a heading (Python-Markdown's toc)."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors() -> set[str]:
    return {slug(heading) for heading in re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.M)}


def started(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environ},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = request.param
    path = tmp_path / f"{name}.py"
    path.write_text(dict(SNIPPET.findall(PAGE.read_text(encoding="utf-8")))[name], encoding="utf-8")
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        yield listener.getsockname()[1]


def snippet(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", [name], indirect=True)


def test_every_snippet_has_a_test() -> None:
    names = {name for name, _ in SNIPPET.findall(PAGE.read_text(encoding="utf-8"))}
    here = Path(__file__).read_text(encoding="utf-8")
    assert names == set(re.findall(r'@snippet\("(\w+)"\)', here))


def test_every_pointer_of_the_doctor_is_a_heading() -> None:
    pointers = {name: cause.see for name, cause in CAUSES.items() if cause.see}
    assert {name: see for name, see in pointers.items() if see not in anchors()} == {}
    assert len(set(pointers.values())) >= 6


def test_every_cause_that_the_page_names_points_back_to_its_section() -> None:
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, body = section.split("\n", 1)
        for name in set(re.findall(r"`(\w+)`", body)) & set(CAUSES):
            assert CAUSES[name].see == slug(heading), f"{heading} names {name}"


def test_the_pointer_is_printed_and_in_the_json() -> None:
    found = Finding("collectives", "train.py:7", "rank 0: all_reduce; rank 1: nothing")
    assert "docs/troubleshooting.md#it-hangs-at-the-end-of-an-epoch" in text([found], steps=3, processes=2)
    assert found.as_json()["see"] == "docs/troubleshooting.md#it-hangs-at-the-end-of-an-epoch"
    unseen = Finding("same_checkpoint", "train.py:7", "twice")
    assert "troubleshooting" not in text([unseen], steps=3, processes=2)
    assert unseen.as_json()["see"] is None


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("device_ordinal")
def test_rank_and_local_rank_on_two_machines(script: Path) -> None:
    port = free_port()
    command = [sys.executable, *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1", str(script)]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    machines = [subprocess.Popen(command, text=True, **quiet) for _ in range(2)]
    try:
        said = "".join(machine.communicate(timeout=240)[0] for machine in machines)
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert "rank 0, local rank 0" in said
    assert "rank 1, local rank 0" in said


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("unused_parameters")
def test_the_error_names_the_parameters(script: Path) -> None:
    done = started(*TWO, script, TORCH_DISTRIBUTED_DEBUG="INFO")
    assert done.returncode != 0
    assert "Expected to have finished reduction in the prior iteration" in done.stdout
    assert re.search(r"did not receive grad for rank \d: .*spare.weight", done.stdout)
    script.write_text(script.read_text().replace("(Net())", "(Net(), find_unused_parameters=True)"))
    assert started(*TWO, script).returncode == 0


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("unused_with_paceline")
def test_unused_parameters_are_no_error_here(script: Path) -> None:
    done = started("-m", "paceline", "run", "--nproc", "2", "--device", "cpu", script)
    assert done.returncode == 0, done.stdout
    assert "4 steps" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("closed_by_peer")
def test_the_peers_error_and_the_first_failure(script: Path) -> None:
    # torchrun ends the others at its next look: with its usual one of 0.1 s rank 0 often dies before it can tell
    done = started(*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--monitor-interval", "15", script)
    assert re.search(r"Connection (closed|reset) by peer", done.stdout)
    assert "SIGKILL" in done.stdout
    ours = started("-m", "paceline", "run", "--nproc", "2", script)
    assert ours.returncode == 137
    assert "rank 1 was killed by SIGKILL" in ours.stdout
    assert "by peer" not in ours.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("hang")
def test_a_batch_more_on_one_rank(script: Path) -> None:
    done = started(*TWO, script)
    assert done.returncode != 0
    doctor = started("-m", "paceline", "doctor", "--nproc", "2", script)
    assert doctor.returncode == 1, doctor.stdout
    assert "docs/troubleshooting.md#it-hangs-at-the-end-of-an-epoch" in doctor.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("spawn")
def test_spawn(script: Path) -> None:
    done = started(script)
    assert "rank 0 of 2: 3" in done.stdout
    assert "rank 1 of 2: 3" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
@snippet("launch")
def test_launch(script: Path) -> None:
    assert "[(0, 3), (1, 3)]" in started(script).stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_port_that_is_taken(taken_port: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    theirs = started(*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(taken_port), script)
    assert "EADDRINUSE" in theirs.stdout
    assert re.search("address already in use", theirs.stdout, re.I)
    command = ["-m", "paceline", "run", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    ours = started(*command, "--master-port", str(taken_port), script)
    assert ours.returncode == 2, ours.stdout
    assert f"port {taken_port}" in ours.stdout
