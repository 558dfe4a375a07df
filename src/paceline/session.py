"""start: from a launcher's environment and the given settings to a Run."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline import world as worlds
from paceline.comm import device_choice, process_group
from paceline.compare.worker.probe import Probe
from paceline.config import Settings, StrategySpec, file_beside, read_file, resolve
from paceline.errors import CheckpointError, PacelineError, UsageError, WorldError
from paceline.run import Run, observe
from paceline.step.excepthook import explain_uncaught
from paceline.strategies import alone
from paceline.strategies import on_cpu as on_cpu_of
from paceline.timeline.worker.tracer import Tracer
from paceline.trials.spec import TrialSpec
from paceline.verify.worker.recorder import Recorder
from paceline.world import World

_open: list[Run] = []  # the open run, if there is one
_explained = False  # has the excepthook been installed?
_unsaved = False  # could a checkpoint not be written at the exit of the process?


def start(
    *,
    strategy: str | StrategySpec | None = None,
    precision: str | None = None,
    seed: int | None = None,
    batch_norm: str | None = None,
    noise: str | None = None,
    compile: bool | None = None,
    nonfinite: str | None = None,
    nonfinite_every: int | None = None,
    fp32_outputs: bool | None = None,
    device: str | None = None,
    log_dir: str | Path | None = None,
    trackers: str | Sequence[str] | None = None,
    log_every: int | None = None,
    progress: str | None = None,
    trace: str | Path | None = None,
    channels_last: bool | None = None,
    deterministic: bool | None = None,
    cudnn_benchmark: bool | None = None,
    tf32: bool | None = None,
    reproducible: int | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Run:
    """Joins the world that the launcher made; alone, the world is this process.

    A `paceline.toml` beside the script overrides what the script gives here, and the command line
    (`paceline run --strategy ... train.py`) overrides both.

    Args:
        strategy: "single" (the default for one process), "ddp" (for several), "data_parallel", "mirrored",
            "central_storage", "shared", "fsdp", "tensor", "pipeline", "local_sgd", "diloco", "parameter_server",
            "deepspeed"; with options, "ddp:bucket_mb=50,static_graph=true" or paceline.strategy("ddp", bucket_mb=50).
        precision: "fp32", "bf16", "fp16" or "bf16-params".
        seed: of all randomness: initialisation, order, augmentation, noise. 0 if not given.
        batch_norm: "global", statistics over the whole global batch, as on one device; "shard", over each shard, which
            makes the model depend on the number of shards.
        noise: whose the noise of the loop or closure is (dropout, a VAE's): "shard", other noise for another number of
            shards; "example", each example's own where it has a row, the same for any number (docs/contract.md).
        compile: compile prepared models with torch.compile.
        nonfinite: what to do at a loss or gradient that is inf or NaN: "stop" or "skip".
        nonfinite_every: on an accelerator every gradient is checked, and the host reads the results of this many steps
            together; 10 if not given. A bad gradient is reported at most twice as many updates later.
        fp32_outputs: in 16 bits, a model that is called in the loop form returns fp32, so that the loss is computed in
            fp32 (the default); False: it returns what torch.autocast does, which is faster and less exact
            (docs/loop.md). In a closure, and under run.autocast(), it always does.
        device: such as "cpu" or "cuda:1"; else this process's accelerator, by its local rank, or the CPU.
        log_dir: where `run.log` writes; not given, nothing is written.
        trackers: what it writes there: "jsonl" (the default), "tensorboard", "wandb", "mlflow"; several as a list.
        log_every: `run.log` writes the mean over this many optimizer steps, 10 if not given.
        progress: "bar", "lines" or "off"; "auto" is a bar in a notebook and on a terminal, else lines.
        trace: a file for what each rank did when, in a format that ui.perfetto.dev opens; at the end of the run it is
            also said which rank was slow (docs/logging.md).
        channels_last: convolutions' weights lie channels last: faster in 16 bits on GPUs with tensor cores.
        deterministic: only kernels that give the same bits in each run; slower, and an error where there is none.
        cudnn_benchmark: try several convolution kernels and keep the fastest: costs seconds for each new input shape.
        tf32: multiply float32 matrices with 10 bits of mantissa on recent GPUs: faster, and less exact.
        reproducible: the same bits of weights and optimizer state on any number of processes from 1 to this one, and
            across a change of that number: the global batch is cut into so many shards (docs/reproducible.md).
        init_method: where the processes meet, such as "tcp://host:port" or "file:///path", as for
            torch.distributed.init_process_group, in place of a launcher's environment.
        rank: of this process, with init_method.
        world_size: how many processes there are, with init_method.

    Returns:
        The run, open until `run.close()`, the next `start`, or the end of the process.

    Raises:
        SettingError: a setting that cannot be.
        WorldError: an environment that describes no world.
    """
    _explain()
    given = {
        "strategy": strategy,
        "precision": precision,
        "seed": seed,
        "batch_norm": batch_norm,
        "noise": noise,
        "compile": compile,
        "nonfinite": nonfinite,
        "nonfinite_every": nonfinite_every,
        "fp32_outputs": fp32_outputs,
        "device": device,
        "log_dir": None if log_dir is None else str(log_dir),
        "trackers": trackers,
        "log_every": log_every,
        "progress": progress,
        "trace": None if trace is None else str(trace),
        "channels_last": channels_last,
        "deterministic": deterministic,
        "cudnn_benchmark": cudnn_benchmark,
        "tf32": tf32,
        "reproducible": reproducible,
    }
    settings, notes = _settings(given)
    world = _world(init_method, rank, world_size)
    spec = TrialSpec.from_env(os.environ)
    settings = settings if spec is None else spec.quiet(settings)
    if world.rank == 0:
        for note in notes:
            print(f"paceline: {note}", file=sys.stderr)
    _close_all()
    world, where = _join(world, settings, init_method)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)  # before the process group ends, which was made earlier
    if settings.strategy is not None:
        strategy, line = alone(settings.strategy, world.size, where, settings.reproducible)
        settings = replace(settings, strategy=strategy)
        if line:
            print(f"paceline: {line}", file=sys.stderr)
    run = Run(world, settings, where, trial=spec is not None)
    if spec is not None:
        tool = Probe if spec.reference is None else Recorder
        observe(run, lambda run, parts: tool(run, parts, spec))
    if settings.trace is not None:
        path = settings.trace
        observe(run, lambda run, parts: Tracer(run, parts, path))
    _open.append(run)
    return run


def _better(error: BaseException) -> Exception | None:
    """What the open run says in place of an error of the user's forward."""
    return None if isinstance(error, PacelineError) or not _open else _open[-1].explanation(error)


def _explain() -> None:
    """Have uncaught errors explained, from the first run on."""
    global _explained
    if not _explained:
        _explained = True
        explain_uncaught(lambda: _open[-1].latest if _open else None, _hand_on, _better)
        atexit.register(_fail_at_exit)  # the first to be registered of those that `start` registers: the last called


def _hand_on(error: BaseException) -> None:
    """An uncaught error ends this process: what it has of the open run may help those that start it again."""
    if _open:
        _open[-1].restarts.hand_on(error)


def current() -> Run | None:
    """The run that is open in this process."""
    return _open[-1] if _open and not _open[-1].closed else None


def _join(world: World, settings: Settings, init_method: str | None) -> tuple[World, torch.device]:
    """Join the default process group. Returns the world with this process's place in it, and this process's device."""
    on_cpu = on_cpu_of(settings.strategy, world.size)
    rendezvous = process_group.Rendezvous(world, init_method)
    world = _by_environment(rendezvous.place())
    device = _device(settings.device, world, on_cpu)
    cards = rendezvous.cards(device) if not on_cpu else []
    rendezvous.join(device, device_choice.backend("cpu" if on_cpu else device.type, cards))
    process_group.check_versions(world, rendezvous.versions)
    shared = device_choice.sharing(cards)
    if shared and world.rank == 0:
        print(f"paceline: {device_choice.note(shared)}", file=sys.stderr)
    return world, device


def _settings(given: dict[str, Any]) -> tuple[Settings, list[str]]:
    overrides = json.loads(os.environ.get(worlds.SETTINGS) or "{}")
    path = overrides.pop("config", None)
    if path is None:
        script = getattr(sys.modules["__main__"], "__file__", None)  # none in a notebook: the current directory
        path = file_beside(script)
    layers = [("the script", given), ("the command line", overrides)]
    if path is not None:
        layers.insert(1, (str(path), read_file(path)))
    return resolve(*layers)


def _close_all() -> None:
    while _open:
        _open.pop().close()


def _close_at_exit() -> None:
    """Close what is open when the process exits. Where an uncaught error ends the process, that error is what to read:
    to close the run may take a collective, and other ranks have gone."""
    global _unsaved
    failed = getattr(sys, "last_value", None) is not None
    main = bool(_open) and _open[-1].main
    try:
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            _close_all()
    except CheckpointError as error:
        _unsaved = True
        if main:
            print(f"paceline: {error}", file=sys.stderr)


def _fail_at_exit() -> None:
    """End with exit code 1 where a checkpoint could not be written. An exception in an exit function does not change
    Python's exit code 0, and whoever has started the process would take the training for done."""
    if _unsaved:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or no file
                stream.flush()
        os._exit(1)


def _world(init_method: str | None, rank: int | None, world_size: int | None) -> World:
    if worlds.EXPORT in os.environ:
        raise UsageError(
            f"paceline export imports {os.environ[worlds.EXPORT]} for its model, and it starts a run. Put what trains "
            'under `if __name__ == "__main__":`.'
        )
    if rank is None and world_size is None and init_method is None:
        return worlds.from_env(os.environ)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise WorldError(
            f"start(init_method={init_method!r}, rank={rank}, world_size={world_size}): all three belong together, "
            "with 0 <= rank < world_size. Leave all out to take the launcher's."
        )
    if world_size > worlds.MOST_PROCESSES:
        raise WorldError(
            f"start(world_size={world_size}): a run may have {worlds.MOST_PROCESSES:,} processes. Give their number."
        )
    return World(rank, world_size, rank, world_size, 0, 1, "start()")


def _by_environment(world: World) -> World:
    """The world of `start(rank=...)` with the local rank that the environment gives, where it gives one."""
    if world.source != "start()":
        return world
    local_rank, local_size = worlds.local_place(os.environ, world.local_rank, world.local_size)
    return replace(world, local_rank=local_rank, local_size=local_size)


def _device(name: str | None, world: World, on_cpu: int) -> torch.device:
    """This process's device, which becomes the current one. on_cpu: of how many ranks, the last, it is the CPU."""
    if world.rank >= world.size - on_cpu:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    device = device_choice.choose(name, None if accelerator is None else accelerator.type, count, world)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device
