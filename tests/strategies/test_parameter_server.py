"""parameter_server: its parts by themselves, and with workers and servers that are killed. Against plain PyTorch:
test_parameter_server_on_ranks.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import ROOT
from tests.strategies import checks
from tests.strategies.server_script import LINEAR_BATCH, LINEAR_EPOCHS, LINEAR_N, RATE

import paceline
from paceline.comm import sockets, wire
from paceline.comm.sockets import Gone, Line, Listening, new_keys
from paceline.config import parse_strategy
from paceline.data.batch_plan import cut
from paceline.data.randomness import permutation
from paceline.errors import SettingError, WorldError, describe_error, only_reports_lost_peer
from paceline.strategies import make
from paceline.strategies.servers.remote_parameters import setting_of
from paceline.strategies.servers.served_parameters import ServedParameters
from paceline.strategies.servers.serving import Serving
from paceline.strategies.servers.work_queue import PassQueue
from paceline.strategies.servers.worker_links import Chunks, Links
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


def test_each_chunk_is_done_once_whoever_gives_it_back() -> None:
    queue = PassQueue(first=1, steps=4, shards=2)
    assert [queue.hand_out(0), queue.hand_out(1), queue.hand_out(1)] == [(1, 0), (1, 1), (2, 0)]
    queue.finish(0, [(1, 0)])
    queue.give_back(1)
    queue.finish(1, [(1, 1)])  # it has given it back
    assert [queue.hand_out(0) for _ in range(5)] == [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert queue.hand_out(0) is None
    queue.give_back(0, [(3, 0)])
    assert not queue.over
    assert queue.hand_out(2) == (3, 0)
    queue.finish(0, [(1, 1), (2, 0), (2, 1), (3, 1), (3, 0)])
    assert not queue.over, "(3, 0) is worker 2's"
    queue.finish(2, [(3, 0)])
    assert queue.over


def test_chunks_without_examples_are_reported_once_also_where_a_loop_is_left() -> None:
    sent: list[dict[str, Any]] = []

    class Server(Links):
        def ask_first(self, header: dict[str, Any]) -> dict[str, Any]:
            sent.append(header)
            return {}

    chunks = Chunks(Server([]), lambda begins: None, lambda: None, lambda optimizer: 0)
    chunks.begin("train", 0, 0, 1)
    chunks.finished("train", 0, (0, 1), empty=True)
    chunks.leave("train", 0)
    chunks.begin("train", 1, 0, 1)
    assert chunks.next_chunk("train", 1, wait=False) is None
    assert chunks.current is None
    assert sum(header.get("empty", 0) for header in sent) == 1


def answered(listening: Listening, line: Line) -> list[bytes] | None:
    line.send([b"hello"])
    found = listening.receive(30)
    if not isinstance(found, tuple) or isinstance(found, Gone):
        return None
    peer, frames = found
    listening.send(peer, [bytes(frame.buffer) for frame in frames])
    return [bytes(frame.buffer) for frame in line.receive(30) or []]


@pytest.mark.conformance
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
    with pytest.raises(WorldError, match="parameter server of rank 9 is lost"):
        lines[1].receive(600)  # longer than a test may take
    lines[1].close()


class After:
    """A monitor socket that is first looked at after `happens`, which ends a connection."""

    def __init__(self, monitor: Any, happens: Callable[[], None]) -> None:
        self._monitor, self._happens = monitor, happens

    def poll(self, milliseconds: int) -> int:
        happens, self._happens = self._happens, lambda: None
        happens()
        return int(self._monitor.poll(0 if milliseconds == 0 else 5000))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor, name)


@pytest.mark.parametrize("side", ["server", "worker"])
def test_the_last_message_before_an_end_is_read_first(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye that arrives with the end of its connection, between two looks of `receive`, is not lost."""
    listening, keys = Listening("127.0.0.1"), new_keys()
    listening.admit([keys.public])
    line = Line(listening.endpoint, listening.keys.public, keys, 0, "the server")
    assert answered(listening, line) == [b"hello"]
    reader: Any = listening if side == "server" else line
    monitor = reader._monitor

    def say_goodbye_and_close() -> None:
        if side == "server":
            line.send([b"bye"])
            line.close()
        else:
            listening.send(0, [b"bye"])
            listening.close()
        assert monitor.poll(30_000), "no connection ended"

    with monkeypatch.context() as patch:
        patch.setattr(reader, "_monitor", After(monitor, say_goodbye_and_close))
        found: Any = reader.receive(30)
        frames = found[1] if side == "server" else found
        assert [bytes(frame.buffer) for frame in frames] == [b"bye"]
        if side == "server":
            assert listening.receive(30) == Gone(0)
        else:
            with pytest.raises(WorldError, match="the server is lost"):
                line.receive(30)
    reader.close()


def test_a_worker_that_is_lost_is_named_to_the_others_and_by_the_server() -> None:
    listening, keys = Listening("127.0.0.1"), new_keys()
    listening.admit([keys.public])
    told: list[str] = []

    def served() -> None:
        with pytest.raises(WorldError) as caught:
            Serving(listening, ServedParameters(), (0, 1)).serve()
        told.append(describe_error(caught.value))
        listening.close()

    server = threading.Thread(target=served)
    server.start()
    lines = [Line(listening.endpoint, listening.keys.public, keys, i, "the parameter server of rank 2") for i in (0, 1)]
    Links([lines[1]]).ask_first({"op": "pull", "names": []})
    lines[1].close()  # without a goodbye
    with pytest.raises(WorldError) as caught:
        Links([lines[0]]).ask_first({"op": "push"})
    lines[0].close()
    server.join()
    told.append(describe_error(caught.value))
    for words in told:
        assert words.startswith("WorldError: the worker of rank 1 is lost or stopped")
        assert only_reports_lost_peer([words])


STOPS = """
import os, signal, sys
from paceline.comm.sockets import Keys, Line
endpoint, server, public, secret = sys.argv[1:]
line = Line(endpoint, server.encode(), Keys(public.encode(), secret.encode()), 4, "the server")
line.send([b"hello"])
line.receive(30)
os.kill(os.getpid(), signal.SIGSTOP)
"""


SERVES = """
import os, signal, sys, time
from paceline.comm.sockets import Listening
listening = Listening("127.0.0.1")
if sys.argv[3] == "slowly":  # this process has the listening socket too, and not the connection that is made later
    server = os.getpid()
    if os.fork() == 0:
        while os.getppid() == server:
            time.sleep(0.01)
        time.sleep(0.5)
        os._exit(0)
listening.admit([sys.argv[1].encode()])
print(listening.endpoint, listening.keys.public.decode(), flush=True)
listening.receive(60)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("signum", "sockets_close", "said"),
    [
        (signal.SIGSTOP, "at once", "does not answer: its process exists, but sent nothing"),
        (signal.SIGKILL, "at once", "is lost: its conn"),
        (signal.SIGKILL, "slowly", "is lost: its conn"),
    ],
)
def test_a_stopped_server_is_not_told_as_dead(
    signum: int, sockets_close: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "SILENCE_SECONDS", 2.0)
    if signum == signal.SIGKILL:
        monkeypatch.setattr(sockets, "TEARDOWN_SECONDS", 30.0)  # on a machine that is busy with other tests
    keys = new_keys()
    command = [sys.executable, "-c", SERVES, keys.public.decode(), str(int(signum)), sockets_close]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = None
    try:
        assert process.stdout is not None
        endpoint, public = process.stdout.readline().split()
        line = sockets.Line(endpoint, public.encode(), keys, 4, "the parameter server of rank 2")
        line.send([b"hello"])
        with pytest.raises(WorldError, match=f"the parameter server of rank 2 {said}") as caught:
            line.receive(60)
        assert only_reports_lost_peer([describe_error(caught.value)])
    finally:
        process.kill()
        process.communicate()
        if line is not None:
            line.close()


@pytest.mark.full
def test_one_that_is_silent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process, or a machine that is cut off: no connection ends."""
    monkeypatch.setattr(sockets, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "SILENCE_SECONDS", 2.0)
    listening, keys = Listening("127.0.0.1"), new_keys()
    listening.admit([keys.public])
    names = [listening.endpoint, listening.keys.public.decode(), *(key.decode() for key in keys)]
    process = subprocess.Popen([sys.executable, "-c", STOPS, *names])
    try:
        found = listening.receive(60)
        assert isinstance(found, tuple)
        assert found[0] == 4
        listening.send(4, [b"hello"])
        assert listening.receive(30) == Gone(4)
    finally:
        process.kill()
        process.wait()
        listening.close()


@pytest.mark.parametrize(
    ("options", "size", "told"),
    [
        ("servers=2", 1, "servers=2: this run has 1 process"),
        ("servers=2", 2, "servers=2 of 2 processes leaves no worker"),
        ("servers=0", 3, "servers=0"),
        ("mode=both", 3, "mode='both'"),
        ("mode=async,staleness=-2", 3, "staleness=-2"),
        ("staleness=3", 3, "in mode=sync no gradient is stale"),
        ("severs=1", 3, "Did you mean 'servers'"),
    ],
)
def test_options_that_cannot_be(options: str, size: int, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        make(
            parse_strategy(f"parameter_server:{options}"), World(0, size, 0, size, 0, 1, "start()"), torch.device("cpu")
        )


# --- several processes


def launched(
    folder: Path, processes: int, options: str, *args: object, restarts: int = 0
) -> tuple[int, str, dict[int, Any]]:
    """Exit code, what was printed, and what each worker left, by rank."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), "--tee", "all"]
    command += [
        "--max-restarts",
        str(restarts),
        "--strategy",
        f"parameter_server:{options}",
        str(SCRIPT),
        str(folder),
        *map(str, args),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    left = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    return done.returncode, done.stdout + done.stderr, left


def are_plain_pytorch(left: dict[int, Any]) -> None:
    plain = checks.plainly(lambda: checks.Net(norm=True), checks.both_heads).state_dict()
    for own in left.values():
        for name, value in plain.items():
            torch.testing.assert_close(
                torch.tensor(own[name], dtype=torch.float64), value.double().flatten(), rtol=1e-9, atol=1e-9
            )


@pytest.mark.conformance
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mode", "job", "victim"),
    [("sync", "net", 1), pytest.param("async", "linear", 0, marks=pytest.mark.full)],
)
def test_a_worker_that_dies_ends_the_run_with_its_name(tmp_path: Path, mode: str, job: str, victim: int) -> None:
    code, text, left = launched(tmp_path, 3, f"mode={mode}", "step", victim, job)
    assert code == 128 + 9
    assert not left
    assert f"rank {victim} was killed by SIGKILL" in text, text
    assert "Traceback" not in text


@pytest.mark.conformance
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("workers", "servers", "mode"),
    [(1, 1, "sync"), pytest.param(2, 2, "sync", marks=pytest.mark.full)],
)
def test_a_server_that_dies_ends_the_run_with_its_name(tmp_path: Path, workers: int, servers: int, mode: str) -> None:
    victim = workers + servers - 1
    options = f"servers={servers},mode={mode}"
    code, text, left = launched(tmp_path, workers + servers, options, "server", victim, "net")
    assert code == 128 + 9
    assert not left
    assert f"rank {victim}, a parameter server, was killed by SIGKILL" in text, text
    assert "a script that calls run.restore resumes from its last checkpoint" in text
    assert "Traceback" not in text


@pytest.mark.timeout(120)
@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "victim", "who"),
    [("server", 2, "rank 2, a parameter server,"), ("step", 1, "rank 1"), ("evaluation", 0, "rank 0")],
)
def test_after_a_death_all_go_on_from_the_checkpoint(tmp_path: Path, where: str, victim: int, who: str) -> None:
    code, text, left = launched(tmp_path, 3, "", where, victim, "net", "saved", restarts=1)
    assert code == 0, text
    assert f"{who} was killed by SIGKILL" in text, text
    assert "paceline: restart 1 of 1." in text
    assert set(left) == {0, 1}
    are_plain_pytorch(left)


@pytest.mark.timeout(120)
@pytest.mark.full
def test_a_function_returns_nothing_on_a_server() -> None:
    def train() -> list[int]:
        run = paceline.start(device="cpu", progress="off")
        run.prepare(torch.nn.Linear(2, 1))
        return list(run.gather(run.world.rank))

    assert paceline.launch(train, nproc=3, timeout=100, strategy="parameter_server") == [[0, 1], [0, 1], None]


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


@pytest.mark.timeout(120)
@pytest.mark.full
@pytest.mark.parametrize(("workers", "servers", "staleness"), [(2, 1, -1), (2, 2, 0), (3, 1, 2)])
def test_not_in_step_each_example_is_used_once(tmp_path: Path, workers: int, servers: int, staleness: int) -> None:
    options = f"mode=async,servers={servers},staleness={staleness}"
    code, text, left = launched(tmp_path, workers + servers, options, "slow", -1, "linear")
    assert code == 0, text
    assert set(left) == set(range(workers))
    assert "mode=async changes the mathematics" in text
    steps = LINEAR_EPOCHS * -(-LINEAR_N // LINEAR_BATCH)
    for own in left.values():
        torch.testing.assert_close(torch.tensor(own["weight"], dtype=torch.float64), once(workers))
        assert own["steps"] == [steps, steps]
        assert own["members"] == list(range(workers))
    if workers == 2:
        fast, slow = left[0]["parts"][0], left[1]["parts"][0]
        assert fast > 1.5 * slow, "parts are not handed out as workers come free"
        assert staleness >= 0 or fast + slow == workers * steps


@pytest.mark.timeout(120)
@pytest.mark.full
def test_not_in_step_it_learns_the_digits(tmp_path: Path) -> None:
    """And what run.log was given is written, of all workers."""
    code, text, left = launched(tmp_path, 3, "mode=async", "", -1, "digits")
    assert code == 0, text
    assert "has no batch" not in text
    assert left[0]["accuracy"] == left[1]["accuracy"]
    assert left[0]["accuracy"][0] > 0.85  # plain PyTorch: 0.90 to 0.91
    (log,) = (tmp_path / "log").rglob("*.jsonl")
    written = [json.loads(line) for line in log.read_text().splitlines()]
    pairs = [(row["loss"], row["halved"]) for row in written if "halved" in row]
    assert len(pairs) > 5
    assert all(abs(loss - 2 * halved) < 1e-5 for loss, halved in pairs)


def test_a_server_updates_with_an_optimizer_that_was_made_for_gpus() -> None:
    """torch has `capturable` on accelerators only, and a server computes on the CPU."""
    found = []
    for capturable in (False, True):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, capturable=capturable)
        served = ServedParameters()
        served.add({"p": parameter}, [optimizer], {parameter: "p"})
        for _ in range(2):
            served.update(0, setting_of(optimizer), 0, {"p": torch.tensor([1.0, 2.0, 3.0])})
        found.append(parameter.detach().clone())
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones(3))
