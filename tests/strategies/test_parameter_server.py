"""parameter_server: its parts by themselves, on several processes against plain PyTorch, and with workers that are
killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import ROOT, run_ranks
from tests.strategies import checks
from tests.strategies.server_script import LINEAR_BATCH, LINEAR_EPOCHS, LINEAR_N, RATE

from paceline.comm import wire
from paceline.comm.sockets import Gone, Line, Listening, new_keys
from paceline.config import parse_strategy
from paceline.errors import SettingError, WorldError
from paceline.strategies import make
from paceline.strategies.servers.dealing import Deals, Exchanges
from paceline.train.order import cut, permutation
from paceline.world import World

SCRIPT = Path(__file__).parent / "server_script.py"


# --- parts


def test_tensors_travel_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(3, 5, dtype=torch.float64, generator=generator).t(),
        torch.randn(700_000, generator=generator),  # several frames
        torch.randn(4, generator=generator).to(torch.bfloat16),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.sparse_coo_tensor(
            torch.tensor([[0, 2, 0]]), torch.randn(3, 4, generator=generator), (5, 4), check_invariants=False
        ),
    ]
    frames = wire.pack({"op": "x"}, [(str(i), t) for i, t in enumerate(tensors)])
    assert max(map(len, frames)) <= wire.FRAME_BYTES
    header, found = wire.unpack([bytes(frame) for frame in frames])
    assert header == {"op": "x"}
    for i, tensor in enumerate(tensors):
        assert found[str(i)].dtype == tensor.dtype
        assert torch.equal(found[str(i)].to_dense(), tensor.to_dense())


def test_each_part_is_done_once_whoever_is_lost() -> None:
    deals = Deals(first=1, steps=4, shards=2)
    assert [deals.take(0), deals.take(1), deals.take(1)] == [(1, 0), (1, 1), (2, 0)]
    deals.done(0, [(1, 0)])
    deals.give_back(1)
    deals.done(1, [(1, 1)])  # from a worker that was given up: it has been handed to another
    assert [deals.take(0) for _ in range(5)] == [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert deals.take(0) is None
    deals.give_back(0, [(3, 0)])
    assert not deals.over
    assert deals.take(2) == (3, 0)
    deals.done(0, [(1, 1), (2, 0), (2, 1), (3, 1), (3, 0)])
    assert not deals.over, "(3, 0) is worker 2's"
    deals.done(2, [(3, 0)])
    assert deals.over


def test_an_exchange_is_complete_when_all_that_live_have_come() -> None:
    exchanges = Exchanges()
    exchanges.came(5, 0, [b"a"])
    exchanges.came(5, 2, [b"c"])
    assert exchanges.complete({0, 1, 2}) == []
    assert exchanges.complete({0, 1}) == []
    assert exchanges.complete({0}) == [(5, {0: [b"a"], 2: [b"c"]})], "one that died after it had come counts"
    assert exchanges.complete({0}) == []


def answered(listening: Listening, line: Line) -> list[bytes] | None:
    line.send([b"hello"])
    found = listening.receive(30)
    if not isinstance(found, tuple) or isinstance(found, Gone):
        return None
    peer, frames = found
    listening.send(peer, [bytes(frame.buffer) for frame in frames])
    return [bytes(frame.buffer) for frame in line.receive(30) or []]


def test_only_known_keys_are_let_in_and_only_over_loopback() -> None:
    listening, keys, stranger = Listening("127.0.0.1"), new_keys(), new_keys()
    listening.admit([keys.public])
    known = Line(listening.endpoint, listening.keys.public, keys, 3, "the server")
    other = Line(listening.endpoint, listening.keys.public, stranger, 4, "the server")
    try:
        assert answered(listening, known) == [b"hello"]
        with contextlib.suppress(WorldError):  # it may have been shown the door already
            other.send([b"hello"])
        assert listening.receive(0.5) is None, "a message of a stranger came through"
        port = int(listening.endpoint.rpartition(":")[2])
        listeners = subprocess.run(["ss", "-ltn"], capture_output=True, text=True, check=False).stdout
        if listeners:
            assert f"127.0.0.1:{port} " in listeners
            assert f"*:{port} " not in listeners
    finally:
        known.close()
        other.close()
        listening.close()


def test_either_side_notices_that_the_other_has_gone() -> None:
    listening, keys = Listening("127.0.0.1"), new_keys()
    listening.admit([keys.public])
    lines = [Line(listening.endpoint, listening.keys.public, keys, i, "the parameter server of rank 9") for i in (0, 1)]
    for line in lines:
        assert answered(listening, line) == [b"hello"]
    lines[0].close()
    assert listening.receive(5) == Gone(0)
    listening.close()
    began = time.monotonic()
    with pytest.raises(WorldError, match="parameter server of rank 9 has gone"):
        lines[1].receive(20)
    assert time.monotonic() - began < 5
    lines[1].close()


@pytest.mark.parametrize(
    ("options", "size", "told"),
    [
        ("", 1, "needs at least 2 processes"),
        ("servers=2", 2, "servers=2 of 2 processes leaves no worker"),
        ("servers=0", 3, "servers=0"),
        ("mode=both", 3, "mode='both'"),
        ("mode=async,staleness=-2", 3, "staleness=-2"),
        ("staleness=3", 3, "in sync no gradient is old"),
        ("severs=1", 3, "Did you mean 'servers'"),
    ],
)
def test_options_that_cannot_be(options: str, size: int, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        make(
            parse_strategy(f"parameter_server:{options}"), World(0, size, 0, size, 0, 1, "start()"), torch.device("cpu")
        )


# --- several processes


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.conformance)])
def test_in_step_it_is_plain_pytorch(size: int) -> None:
    """2 workers; 1 server, or 2."""
    for failed in run_ranks(size, "tests.strategies.server_checks:run_all", deadline=150):
        assert not failed, "\n".join(failed.values())


def launched(folder: Path, processes: int, options: str, *args: object) -> tuple[int, str, dict[int, Any]]:
    """Exit code, what was printed, and what each worker left, by rank."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), "--tee", "all"]
    command += ["--strategy", f"parameter_server:{options}", str(SCRIPT), str(folder), *map(str, args)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    left = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    return done.returncode, done.stdout + done.stderr, left


KILLED = [("step", 0, 1), ("backward", 0, 1), ("forward", 1, 1), ("step", 1, 2), ("after", 1, 1), ("after", 0, 2)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "victim", "servers"),
    [pytest.param(*case, marks=[pytest.mark.conformance] if i else []) for i, case in enumerate(KILLED)],
)
def test_in_step_a_worker_that_is_killed_is_not_missed(tmp_path: Path, where: str, victim: int, servers: int) -> None:
    workers = 2 if (where, victim, servers) == KILLED[0] else 3
    code, text, left = launched(tmp_path, workers + servers, f"servers={servers}", where, victim, "net")
    assert code == 0, text
    assert set(left) == set(range(workers)) - {victim}
    assert f"rank {victim} was killed by SIGKILL" in text
    assert f"worker of rank {victim} has died; {workers - 1} go on" in text
    plain = checks.plainly(lambda: checks.Net(norm=True), checks.both_heads).state_dict()
    for own in left.values():
        for name, value in plain.items():
            torch.testing.assert_close(
                torch.tensor(own[name], dtype=torch.float64), value.double().flatten(), rtol=1e-9, atol=1e-9
            )


@pytest.mark.timeout(120)
@pytest.mark.conformance
def test_a_worker_that_dies_in_an_evaluation_is_named_and_the_run_ends(tmp_path: Path) -> None:
    code, text, left = launched(tmp_path, 4, "servers=1", "evaluation", 1, "net")
    assert code != 0
    assert not left
    assert "the worker of rank 1 has died outside of a training batch" in text, text


def once(workers: int) -> torch.Tensor:
    """The weights when each example of each epoch was used once, in a part of a global batch for each worker."""
    weight = torch.zeros(LINEAR_N, dtype=torch.float64)
    for epoch in range(LINEAR_EPOCHS):
        order = permutation(LINEAR_N, 0, "train", epoch)
        for start in range(0, LINEAR_N, LINEAR_BATCH):
            batch = order[start : start + LINEAR_BATCH]
            for worker in range(workers):
                low, high = cut(len(batch), workers, worker)
                weight[torch.from_numpy(batch[low:high])] -= RATE / max(high - low, 1)
    return weight


NOT_IN_STEP = [
    ("after", 1, 1, -1),  # killed after its push, before it has said so: not applied twice
    ("step", 1, 2, -1),  # before it: its part is computed by another
    ("slow", -1, 1, -1),
    ("slow", -1, 2, 0),
    ("step", 0, 1, 2),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "victim", "servers", "staleness"),
    [pytest.param(*case, marks=[pytest.mark.conformance] if i else []) for i, case in enumerate(NOT_IN_STEP)],
)
def test_not_in_step_each_example_is_used_once(
    tmp_path: Path, where: str, victim: int, servers: int, staleness: int
) -> None:
    workers = 3 if victim >= 0 and servers == 2 else 2
    options = f"mode=async,servers={servers},staleness={staleness}"
    code, text, left = launched(tmp_path, workers + servers, options, where, victim, "linear")
    assert code == 0, text
    assert set(left) == set(range(workers)) - {victim}
    assert "mode=async changes the mathematics" in text
    steps = LINEAR_EPOCHS * -(-LINEAR_N // LINEAR_BATCH)
    for own in left.values():
        torch.testing.assert_close(torch.tensor(own["weight"], dtype=torch.float64), once(workers))
        assert own["steps"] == [steps, steps]
        assert own["members"] == sorted(set(range(workers)) - {victim})
    if victim < 0:
        fast, slow = left[0]["parts"][0], left[1]["parts"][0]
        assert fast > 1.5 * slow, "parts are not handed out as workers come free"
        assert staleness >= 0 or fast + slow == workers * steps


@pytest.mark.timeout(120)
@pytest.mark.conformance
def test_not_in_step_it_learns_the_digits(tmp_path: Path) -> None:
    """And what run.log was given is written, of all workers."""
    code, text, left = launched(tmp_path, 3, "mode=async", "", -1, "digits")
    assert code == 0, text
    assert left[0]["accuracy"] == left[1]["accuracy"]
    assert left[0]["accuracy"][0] > 0.9
    (log,) = (tmp_path / "log").rglob("*.jsonl")
    written = [json.loads(line) for line in log.read_text().splitlines()]
    pairs = [(row["loss"], row["halved"]) for row in written if "halved" in row]
    assert len(pairs) > 5
    assert all(abs(loss - 2 * halved) < 1e-5 for loss, halved in pairs)
