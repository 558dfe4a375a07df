"""The probe in a run of one process, and what it measures with."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.compare.worker import probe, resources
from paceline.compare.worker.communication_profile import communication_time, overlap, union
from paceline.compare.worker.probe import TrialEnded
from paceline.compare.worker.resources import peak_memory, traffic
from paceline.errors import SettingError
from paceline.monitor.trackers import Config
from paceline.trials.spec import PROFILED_STEPS
from paceline.world import TRIAL

STEPS, WARMUP = 9, 2


class Told:
    """A tracker that remembers that it was called."""

    calls: ClassVar[list[str]] = []

    def begin(self, config: Config, step: int) -> None:
        self.calls.append("begin")

    def log(self, values: Any, step: int, epoch: int) -> None:
        self.calls.append("log")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A trial's spec in the environment; the current directory is an empty one."""
    (tmp_path / "records").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    asked = {"directory": str(tmp_path / "records"), "steps": STEPS, "warmup": WARMUP, "launched_at": time.time()}
    monkeypatch.setenv(TRIAL, json.dumps(asked))
    return asked


def script(
    epochs: int = 100, evaluates: bool = True, pause: Callable[[], object] = lambda: None, **options: Any
) -> paceline.Run:
    """3 steps of 2 micro-batches in an epoch, then an evaluation; two optimizer steps for each global batch."""
    data = TensorDataset(torch.ones(24, 2))
    run = paceline.start(device="cpu", log_dir="logs")
    run.add_tracker(Told())
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    run.prepare(one, two, *optimizers)
    loader = run.loader(data, **{"global_batch": 8, "micro_batch": 4, **options})
    test = run.loader(data, global_batch=24, train=False)
    assert run.restore("checkpoints") is False
    try:
        for _ in run.epochs(epochs):
            for (x,) in loader:
                for model, optimizer in zip((one, two), optimizers, strict=True):
                    run.backward(model(x).square().mean(), optimizer=optimizer)
                    run.step(optimizer)
                run.log(seen=1.0)
            for _ in test if evaluates else [None]:
                pause()
            if evaluates:
                assert not run.save("checkpoints").exists()
                run.export("weights.safetensors", one)
    finally:
        run.close()
    return run


def written(spec: dict[str, Any]) -> Any:
    return json.loads((Path(spec["directory"]) / "rank-0.json").read_text())


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_trial_is_measured_and_ended(spec: dict[str, Any], evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = 0.0

    def pause() -> None:
        nonlocal skipped
        skipped += 1000.0

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped, time=time.time)
    monkeypatch.setattr(probe, "time", clock)
    with pytest.raises(TrialEnded) as ended:
        script(evaluates=evaluates, pause=pause)
    assert ended.value.code == 0
    assert list(Path.cwd().iterdir()) == []
    assert Told.calls == []
    record = written(spec)
    steps = record["steps"]
    assert [(step["epoch"], step["step"]) for step in steps] == [(n // 3, n % 3) for n in range(STEPS)]
    assert [step["timed"] for step in steps] == [n >= WARMUP for n in range(STEPS)]
    for step in steps:
        assert step["parts"] == [[0, 0, 4], [0, 1, 4]]
        assert step["total"] == 8
        assert set(step["losses"]) == {"0", "1"}
        assert {weight for _, weight in step["losses"].values()} == {8}
        assert 0 < step["waited"] < step["seconds"]
    # An epoch's first step leaves out what came before it: 1,000 s, by the clock of this test.
    assert skipped
    assert all(step["seconds"] < 1000.0 for step in steps)
    assert record["communication"]["operations"] == 0
    assert record["memory_kind"] == "resident"
    assert record["bytes_sent"] == 0
    assert record["start_up_seconds"] > 0


def test_a_script_that_ends_first_leaves_what_there_is(spec: dict[str, Any]) -> None:
    script(epochs=2)
    record = written(spec)
    assert len(record["steps"]) == 6
    assert record["communication"] is None
    assert record["bytes_sent"] == 0


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize(
    ("rate", "options", "draws"),
    [
        (0.5, {}, True),
        (0.0, {}, False),
        (0.5, {"strategy": "single:shards=2"}, True),
        (0.5, {"noise": "example"}, False),
    ],
)
def test_what_the_model_draws_is_noted(
    closure: bool, rate: float, options: dict[str, Any], draws: bool, spec: dict[str, Any]
) -> None:
    """What the loader draws, to shuffle and for each example, is not the model's."""
    run = paceline.start(device="cpu", progress="off", **options)
    model = nn.Sequential(nn.Linear(2, 4), *([nn.Dropout(rate)] if rate else []), nn.Linear(4, 1))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = run.loader(Drawn(), global_batch=8, shuffle=True)
    with pytest.raises(TrialEnded):
        train(run, model, optimizer, loader, closure)
    run.close()
    assert written(spec)["traits"] == (["draws"] if draws else [])


def train(run: paceline.Run, model: Any, optimizer: Any, loader: Any, closure: bool) -> None:
    for _ in run.epochs(100):
        for x in loader:
            if closure:
                run.forward_backward(lambda model, x: model(x).square().mean(), model, x)
            else:
                run.backward(model(x).square().mean())
            run.step(optimizer)


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2)


def test_another_global_batch(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIAL, json.dumps({**spec, "global_batch": 12}))
    with pytest.raises(TrialEnded):
        script(micro_batch=None)
    assert {step["total"] for step in written(spec)["steps"]} == {12}
    with pytest.raises(SettingError, match="has a batch_sampler"):
        script(global_batch=None, micro_batch=None, batch_sampler=[[0, 1], [2, 3]])


def test_without_a_trial_a_run_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRIAL, raising=False)
    run = paceline.start(device="cpu", progress="off")
    assert run._stepper.losses is None
    assert not {"step", "save", "loader", "close"} & set(vars(run))
    run.close()


def test_profiled_steps_come_on_top() -> None:
    assert PROFILED_STEPS >= 2  # the first is not counted


# --- what it measures with


@dataclass
class Event:
    name: str
    start: float
    end: float
    kind: str = "CPU"
    is_user_annotation: bool = False

    @property
    def time_range(self) -> Any:
        return self

    @property
    def device_type(self) -> Any:
        return type("Kind", (), {"name": self.kind})


def test_communication_on_a_cpu() -> None:
    """Two operations that overlap, of which 1 s lies behind an operator of torch. Waiting for them is no operator."""
    seconds = [
        ("gloo:all_reduce", 2, 5), ("gloo:all_reduce", 4, 7), ("aten::mm", 1, 3), ("aten::add", 1.5, 2.5),
        ("c10d::allreduce_", 2, 7), ("autograd::engine::evaluate_function: X", 0, 9),
    ]  # fmt: skip
    found = communication_time([Event(name, start * 1e6, end * 1e6) for name, start, end in seconds], accelerated=False)
    assert found == (2, pytest.approx(5.0), pytest.approx(4.0))


def test_communication_on_a_gpu() -> None:
    """By what runs there: the host, which enqueues long before, does not matter."""
    events = [
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2e6, 6e6, "CUDA"),
        Event("ampere_sgemm", 1e6, 4e6, "CUDA"),
        Event("Optimizer.step#SGD.step", 0, 9e6, "CUDA"),
        Event("aten::mm", 0, 9e6),
        Event("nccl:all_reduce", 0, 9e6),
    ]
    assert communication_time(events, accelerated=True) == (1, pytest.approx(4.0), pytest.approx(2.0))


def test_annotations_on_a_gpus_timeline_are_no_work() -> None:
    """The profiler draws every record_function that has launched kernels on the GPU too, around them: a script's own
    are no computing, and NCCL's no second operation."""
    events = [
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2e6, 6e6, "CUDA"),
        Event("nccl:all_reduce", 2e6, 6e6, "CUDA", is_user_annotation=True),
        Event("nccl:_reduce_scatter_base", 1e6, 7e6, "CUDA", is_user_annotation=True),
        Event("my training step", 0, 9e6, "CUDA", is_user_annotation=True),
        Event("FSDP::pre_forward (block 1)", 0, 9e6, "CUDA", is_user_annotation=True),
        Event("void at::native::vectorized_elementwise_kernel", 5e6, 7e6, "CUDA"),
    ]
    assert communication_time(events, accelerated=True) == (1, pytest.approx(4.0), pytest.approx(3.0))


def test_the_profiler_says_which_events_are_annotations() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("mine"):
            torch.ones(2).add(1)
    found = {event.name: event.is_user_annotation for event in profiler.events() or []}
    assert found["mine"]
    assert not found["aten::add"]


def test_spans() -> None:
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]
    assert overlap([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0), (4.5, 9.0)]) == pytest.approx(1 + 1 + 0.5)


def test_bytes_of_this_process_alone() -> None:
    """Of the connections that are open: the end that receives is counted while it is."""
    before = traffic()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        received, _ = server.accept()
        with received:
            client.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(received.recv(left))
            both = traffic()
        one = traffic()
    assert before is not None
    assert both is not None
    assert one is not None
    assert (both.sent - before.sent, both.received - before.received) == (100_000, 100_000)
    assert one.sent - before.sent == 100_000
    assert one.received - before.received <= 1  # the end of a connection counts as one


def test_bytes_that_had_to_be_sent_again_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is made here, with the offsets of linux/tcp.h: few kernels can be made to lose packets."""
    info = bytearray(256)
    struct.pack_into("=Q", info, 200, 5000)  # tcpi_bytes_sent
    struct.pack_into("=Q", info, 208, 1000)  # tcpi_bytes_retrans
    answers = iter([bytes(info)])
    monkeypatch.setattr(resources, "_tcp_info", lambda descriptor: next(answers, None))
    found = traffic()
    assert found is not None
    assert found.sent == 4000


def test_peak_memory_does_not_fall() -> None:
    before, kind = peak_memory(torch.device("cpu"))
    block = torch.ones(50_000_000)  # 200 MB, all of it touched
    reached, _ = peak_memory(torch.device("cpu"))
    del block
    assert kind == "resident"
    assert reached >= max(before, 200_000_000)
    assert peak_memory(torch.device("cpu"))[0] > 0.98 * reached  # the kernel counts in batches
