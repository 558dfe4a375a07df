"""hvd.elastic: samplers, states, and scripts whose worker is killed."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ports import free_port
from torch import nn

import paceline.horovod as hvd
from paceline.errors import SettingError, UsageError
from paceline.horovod.elastic import elastic_state


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init()


@pytest.mark.usefixtures("alone")
def test_the_sampler_cuts_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list(range(11))
    random.Random(3 + 2).shuffle(order)
    sampler = hvd.elastic.ElasticSampler(range(11), seed=3)
    sampler.set_epoch(2)
    assert list(sampler) == order
    sampler.record_batch(0, 4)
    saved = sampler.state_dict()
    parts = []
    for rank in range(3):
        monkeypatch.setattr("paceline.horovod.hvd_world.size", lambda: 3)
        monkeypatch.setattr("paceline.horovod.hvd_world.rank", lambda rank=rank: rank)
        later = hvd.elastic.ElasticSampler(range(11), seed=3)
        later.load_state_dict(saved)
        assert len(later) == 3
        parts.append(list(later))
    left = order[4:] + order[4:6]  # made up to 9
    assert [parts[n % 3][n // 3] for n in range(9)] == left
    assert list(hvd.elastic.ElasticSampler(range(2), shuffle=False)) == [0], "one index three ways: as often as needed"


@pytest.mark.usefixtures("alone")
def test_a_state_goes_back_to_its_last_copy() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(4))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, losses=[], epoch=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state.losses.append(3.0)
    state.epoch = 2
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sampler.record_batch(0, 2)
    state.restore()
    assert (state.epoch, state.losses, sampler.processed_num, optimizer.state_dict()["state"]) == (1, [], 0, {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    state.model = other = nn.Linear(2, 1)
    state.commit()
    nn.init.zeros_(other.weight)
    state.restore()
    assert other.weight.abs().sum() > 0
    with pytest.raises(SettingError, match="has a method of that name"):
        hvd.elastic.TorchState(model, commit=1)
    with pytest.raises(UsageError, match=r"different attributes \(epoch\)"):
        hvd.elastic.TorchState(model, optimizer, sampler=sampler, losses=[])._load(state._saved)


SCRIPT = """
    import json, os, signal, sys
    import torch
    from torch import nn
    import paceline.horovod as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.arange(72.0).double().view(24, 3) / 24
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    die = sys.argv[1:] == ["die"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    starts = []

    @hvd.elastic.run
    def train(state):
        starts.append((state.epoch, state.batch))
        while state.epoch < 3:
            for rows in torch.utils.data.DataLoader(data, batch_size=12 // hvd.size(), sampler=state.sampler):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
                state.batch += 1
                state.sampler.record_batch(state.batch, len(rows))
                state.commit()
                if die and hvd.rank() == 1 and state.batch == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
    state.register_reset_callbacks([lambda: starts.append("reset")])
    torch.manual_seed(0)
    if hvd.rank() == 0:
        nn.init.normal_(model.weight)
    train(state)
    if hvd.rank() == 0:
        with open("found.json", "w") as file:
            json.dump([starts, state.batch, [p.tolist() for p in model.parameters()]], file)
"""


def launched(folder: Path, nproc: int, *arguments: str, script: str = SCRIPT) -> tuple[Any, str]:
    """What the script found, and stderr."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", f"--nproc={nproc}", "--max-restarts=1", "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.rglob("horovod-commit*")), "the commits end with the run"
    return json.loads((folder / "found.json").read_text()), done.stderr


@pytest.mark.full
def test_a_script_whose_worker_is_killed_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    (_, batches, weights), _ = launched(tmp_path, 1)
    (starts, found_batches, found), _ = launched(tmp_path, 2, "die")
    assert starts[0] == "reset"
    assert starts[1] in ([1, 2], [1, 3]), "the commit of the batch at hand, if it was written before all were ended"
    assert found_batches == batches == 6
    for own, other in zip(found, weights, strict=True):
        assert torch.allclose(torch.tensor(own).double(), torch.tensor(other).double(), rtol=1e-12)


FULL = """
import resource
def limit(files):  # a disk that is full for what this process writes; SIGXFSZ is ignored in Python
    resource.setrlimit(resource.RLIMIT_FSIZE, (files, resource.RLIM_INFINITY))
"""


@pytest.mark.conformance
def test_a_disk_that_is_full_costs_commits_and_not_the_training(tmp_path: Path) -> None:
    """The disk is full from batch 2 to 4. Rank 1 dies at batch 3: the second start goes back to commit 1."""
    script = textwrap.dedent(SCRIPT).replace("hvd.init()", FULL + "hvd.init()", 1)
    script = script.replace("state.commit()\n", "limit(99 if 2 <= state.batch < 5 else -1); state.commit()\n", 1)
    (_, batches, weights), _ = launched(tmp_path, 1)
    (starts, found_batches, found), stderr = launched(tmp_path, 2, "die", script=script)
    assert starts == ["reset", [0, 1]]
    assert found_batches == batches == 6
    assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(found, weights, strict=True))
    said = [line for line in stderr.splitlines() if "could not be written" in line]
    assert len(said) == 2, "once in each of the two starts"
    assert all("would resume from commit 1. Free space, or set TMPDIR" in line for line in said)


def test_a_full_disk_is_named_where_torch_tells_of_its_own_file_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """torch.save to a full tmpfs raises a RuntimeError, while it handles the OSError of the disk."""

    def save(content: Any, file: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 as torch has it

    monkeypatch.setattr(torch, "save", save)
    assert elastic_state._write(tmp_path / elastic_state.FILE, {}) == "No space left on device"
    assert not list(tmp_path.iterdir())


WAITS = """
import pathlib, time
hvd.init()
def wait_at(batch, now):  # alone, for the other machine
    pathlib.Path("under-way").touch()
    while now == batch and hvd.size() == 1: time.sleep(0.01)
"""


@pytest.mark.full
def test_a_script_goes_on_from_its_last_commit_when_a_machine_comes(tmp_path: Path) -> None:
    """That takes up no restart, and none need be allowed."""
    script = textwrap.dedent(SCRIPT).replace("state.commit()\n", "state.commit(); wait_at(3, state.batch)\n", 1)
    script = script.replace("hvd.init()", WAITS, 1)
    (tmp_path / "script.py").write_text(script)
    port = free_port()
    options = ["--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1"]
    launchers: list[subprocess.Popen[bytes]] = []
    for machine in range(2):
        folder = tmp_path / f"tmp{machine}"
        folder.mkdir()
        environ = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "paceline", "run", *options, "script.py"]
        launchers.append(subprocess.Popen(command, cwd=tmp_path, env=environ))
        deadline = time.monotonic() + 60
        while machine == 0 and not (tmp_path / "under-way").exists():
            assert time.monotonic() < deadline
            assert launchers[0].poll() is None
            time.sleep(0.05)
    assert [launcher.wait(timeout=60) for launcher in launchers] == [0, 0]
    starts, batches, _ = json.loads((tmp_path / "found.json").read_text())
    assert starts == ["reset", [1, 3]]
    assert batches == 6
