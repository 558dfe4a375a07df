"""A data set of shards in jobs that end by force, and go on with another number of processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.data.test_shards import Files, a_model, loss_fn
from tests.state.test_newest_state import Job
from torch import Tensor

LENGTHS = [9, 0, 23, 1, 12, 5, 16, 31]
SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
"""
SCRIPT += """
import json, os, signal
from pathlib import Path
import paceline
from tests.data.test_shard_jobs import LENGTHS
from tests.data.test_shards import Files, a_model, loss_fn

run = paceline.start(progress="off")
model, optimizer = run.prepare(*a_model())
workers, reading = int(sys.argv[1]), Path(sys.argv[2])
loader = run.loader(Files(LENGTHS, reading), global_batch=8, shuffle=True, num_workers=workers)
run.restore("checkpoints", missing_ok=True)
run.print("starts at", run.steps)
first = run.steps
for epoch in run.epochs(2):
    for batch in loader:
        if f"{first}:{run.steps}:{run.rank}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = run.gather(list(zip(loader.rows, batch.tolist())))
        with open(f"order{run.rank}", "a") as file:
            print(run.steps, json.dumps([int(n) for _, n in sorted(numbers)]), file=file)
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
        run.save("checkpoints", keep=2)
if run.main:
    print(json.dumps({name: value.tolist() for name, value in model.state_dict().items()}))
run.close()
"""


def order(folder: Path) -> list[list[int]]:
    """The global batches that rank 0 saw; of a step that was repeated, the last."""
    lines = (folder / "order0").read_text().splitlines()
    found = {int(step): json.loads(numbers) for step, _, numbers in (line.partition(" ") for line in lines)}
    return [found[step] for step in sorted(found)]


def plainly(batches: list[list[int]]) -> dict[str, Tensor]:
    model, optimizer = a_model()
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, torch.tensor([float(number) for number in batch])).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.conformance
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("first", "then", "workers"),
    [
        (2, 1, 0),
        (1, 3, 0),
        pytest.param(8, 2, 0, marks=pytest.mark.full),
        pytest.param(3, 8, 0, marks=pytest.mark.full),
    ],
)
def test_a_killed_job_goes_on_with_another_number_of_processes(
    first: int, then: int, workers: int, tmp_path: Path
) -> None:
    """The order is that of one undisturbed process, and the model that of plain PyTorch on it."""
    for name in ("reading", "again", "whole"):
        (tmp_path / name).mkdir()
    whole = Job(tmp_path / "whole" / "job", SCRIPT)
    job = Job(tmp_path / "job", SCRIPT)
    try:
        end = whole.run("--nproc", "1", "train.py", "0", str(tmp_path / "whole"))[1]
        undisturbed = order(whole.folder)
        assert sorted(chain(*undisturbed)) == sorted(2 * every_example())

        killed = job.start("--nproc", str(first), "train.py", str(workers), str(tmp_path / "reading"), "0:7:0")
        _, err = killed.communicate(timeout=150)
        assert killed.returncode == 128 + signal.SIGKILL, err
        starts, told, err = job.run("--nproc", str(then), "train.py", str(workers), str(tmp_path / "again"))
        assert starts == [7], err
    finally:
        whole.close()
        job.close()
    assert order(job.folder) == undisturbed
    for found in (json.loads(told), json.loads(end)):
        for name, value in plainly(undisturbed).items():
            torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), value, rtol=0, atol=1e-12)


def test_a_directory_for_temporary_files_that_is_too_long_for_workers(tmp_path: Path) -> None:
    """torch would hang. At the limit, workers work."""
    script = """
import sys, torch, paceline
run = paceline.start(progress="off")
loader = run.loader(torch.arange(6.0), global_batch=2, num_workers=1)
print([batch.tolist() for batch in loader])
run.close()
"""
    (tmp_path / "train.py").write_text(script)
    for length, works in ((75, True), (76, False)):
        folder = "/tmp/paceline-".ljust(length - 8, "x") + f"{os.getpid():08}"
        Path(folder).mkdir()
        line = [sys.executable, "train.py"]
        done = subprocess.run(
            line, cwd=tmp_path, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True, timeout=150
        )
        shutil.rmtree(folder)
        assert (done.returncode == 0) == works, done.stderr
        if works:
            assert done.stdout.strip() == "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]"
        else:
            assert "SettingError: run.loader(name='train', num_workers=1): workers send tensors" in done.stderr
            assert "TMPDIR has 76 characters, 1 too many" in done.stderr


def every_example() -> list[int]:
    files = Files(LENGTHS)
    return [int(number) for name in files.shards for number in files.read(name, 0)]


@pytest.mark.conformance
@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "reading").mkdir()
    job = Job(tmp_path / "job", SCRIPT)
    try:
        line = ["--nproc", "2", "--max-restarts", "2", "train.py", "0", str(tmp_path / "reading")]
        starts, told, err = job.run(*line, "0:3:1", "3:17:0")
    finally:
        job.close()
    assert starts == [0, 3, 17], err
    found = json.loads(told)
    for name, value in plainly(order(job.folder)).items():
        torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), value, rtol=0, atol=1e-12)
