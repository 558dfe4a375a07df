"""paceline.start: make a Run from the launcher's environment and the settings."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline import world as worlds
from paceline.balance.balance import Balance, split_unequally
from paceline.comm import device_choice, process_group
from paceline.compare.worker.probe import Probe
from paceline.config import Settings, StrategySpec, file_beside, read_file, resolve
from paceline.errors import CheckpointError, PacelineError, SettingError, UsageError, WorldError
from paceline.run import Run, RunParts, observe, parts_of
from paceline.step.excepthook import explain_uncaught
from paceline.step.observer import StepObserver
from paceline.strategies import alone
from paceline.strategies import on_cpu as on_cpu_of
from paceline.timeline.worker.tracer import Tracer
from paceline.trials.spec import TrialSpec
from paceline.verify.worker.recorder import Recorder
from paceline.world import World

_open: list[Run] = []  # the open run, or empty
_explained = False  # whether the excepthook is installed
_unsaved = False  # whether writing a checkpoint failed while the process exited


def start(
    *,
    strategy: str | StrategySpec | None = None,
    precision: str | None = None,
    seed: int | None = None,
    batch_norm: str | None = None,
    noise: str | None = None,
    compile: bool | str | None = None,
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
    balance: bool | None = None,
    peak_flops: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Run:
    """Start a run: join the other processes of the launcher, or run alone without a launcher.

    A `paceline.toml` beside the script overrides these arguments, and the command line
    (`paceline run --strategy ... train.py`) overrides both.

    Args:
        strategy: "single" (the default for one process), "ddp" (the default for several processes), "data_parallel",
            "mirrored", "central_storage", "shared", "fsdp", "tensor", "fsdp+tensor", "ulysses", "fsdp+ulysses",
            "pipeline", "local_sgd", "diloco", "parameter_server" or "deepspeed". With options:
            "ddp:bucket_mb=50,static_graph=true" or paceline.strategy("ddp", bucket_mb=50).
        precision: "fp32", "bf16", "fp16" or "bf16-params".
        seed: seed of all randomness: initialisation, order, augmentation, noise. Default: 0.
        batch_norm: "global": statistics over the global batch, as on one device. "shard": statistics over each shard,
            which make the model depend on the number of shards.
        noise: whether dropout and other in-model randomness is keyed by shard or by example. "shard": it depends on
            the number of shards. "example": it does not, if each example has a row (docs/contract.md).
        compile: compile prepared models with torch.compile. True, or its mode: "reduce-overhead", "max-autotune" or
            "max-autotune-no-cudagraphs".
        nonfinite: what to do at an inf or NaN loss or gradient: "stop" or "skip".
        nonfinite_every: on an accelerator, the host reads the gradient checks of this many steps together. Default: 10.
            A bad gradient is reported at most twice this number of updates later.
        fp32_outputs: in 16-bit precision, models called in the loop form return fp32, so that the loss is computed in
            fp32 (the default). False: they return the dtype that torch.autocast gives, which is faster and less exact
            (docs/loop.md). Closures and run.autocast() always follow torch.autocast.
        device: such as "cpu" or "cuda:1". Default: the accelerator of this process's local rank, or the CPU.
        log_dir: the directory for `run.log`. Default: nothing is written.
        trackers: the formats in log_dir: "jsonl" (the default), "tensorboard", "wandb", "mlflow", or a list of several.
        log_every: `run.log` writes the mean over this many optimizer steps. Default: 10.
        progress: "bar", "lines" or "off". "auto" is a bar in a notebook or terminal, else lines.
        trace: write a trace of all ranks over time to this file, for ui.perfetto.dev. At its end, the run then also
            reports slow ranks (docs/logging.md).
        channels_last: store convolution weights channels last. Faster in 16 bits on GPUs with tensor cores.
        deterministic: use only deterministic kernels, and raise if there is none. Slower.
        cudnn_benchmark: try several convolution kernels and keep the fastest. Takes seconds for each new input shape.
        tf32: multiply float32 matrices with 10 bits of mantissa on recent GPUs. Faster, but less exact.
        reproducible: a number V. Weights and optimizer state get the same bits on 1 to V processes, even if the number
            of processes changes during the run. The global batch is split into V shards (docs/reproducible.md).
        balance: give each process a share of every global batch that fits its speed, for devices that are not alike
            (docs/balance.md).
        peak_flops: a device's peak, such as "989TFLOP/s", or "auto" to look it up. Then `run.log` and the summary show
            the part of it that training reaches, the model FLOPs utilization (docs/logging.md).
        init_method: the rendezvous, such as "tcp://host:port" or "file:///path", as for
            torch.distributed.init_process_group. Replaces a launcher's environment.
        rank: this process's rank, with init_method.
        world_size: the number of processes, with init_method.

    Returns:
        The run. It is open until `run.close()`, the next `start`, or the end of the process.

    Raises:
        SettingError: a setting has an invalid value.
        WorldError: ranks and numbers of processes in the environment or the arguments are inconsistent.
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
        "balance": balance,
        "peak_flops": peak_flops,
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
    atexit.register(_close_at_exit)  # runs before the process group is destroyed: that function was registered earlier
    if settings.strategy is not None:
        strategy, line = alone(settings.strategy, world.size, where, settings.reproducible)
        settings = replace(settings, strategy=strategy)
        if line:
            print(f"paceline: {line}", file=sys.stderr)
    run = Run(world, settings, where, trial=spec is not None)
    try:
        _observe(run, spec)
    except SettingError:
        run.close()
        raise
    _open.append(run)
    return run


def _observe(run: Run, spec: TrialSpec | None) -> None:
    """Attach the observers that the settings ask for, or the tool of a trial. Raises SettingError."""
    settings = run.settings
    if spec is not None:
        tool = _trial_observer(spec)
        observe(run, lambda run, parts: tool(run, parts, spec))
    if settings.balance:
        _balance(run, spec)
    if settings.peak_flops is not None and spec is None:
        peak = settings.peak_flops
        from paceline.utilization import Utilization  # it imports torch's counter, and sympy with it

        observe(run, lambda run, parts: Utilization(run, parts, peak))
    if settings.trace is not None:
        path = settings.trace
        observe(run, lambda run, parts: Tracer(run, parts, path))


def _balance(run: Run, spec: TrialSpec | None) -> None:
    """Balance a run. A trial is too short to measure: in `verify` the shards are unequal, in other tools equal."""
    if spec is None and run.world.size > 1:
        observe(run, Balance)
    elif spec is not None and spec.reference is not None:
        split_unequally(run, parts_of(run))


def _trial_observer(spec: TrialSpec) -> Callable[[Run, RunParts, TrialSpec], StepObserver]:
    """The observer of a trial of `paceline verify`, `plan` or `compare`."""
    if spec.reference is not None:
        return Recorder
    if spec.measures_step:
        from paceline.planning.worker.step_measure import StepMeasure  # it imports FSDP2 and DTensor

        return StepMeasure
    return Probe


def _better(error: BaseException) -> Exception | None:
    """Return a clearer error for a failed forward of the user's model, if the open run has one."""
    return None if isinstance(error, PacelineError) or not _open else _open[-1].explanation(error)


def _explain() -> None:
    """Install the excepthook that explains uncaught errors, once."""
    global _explained
    if not _explained:
        _explained = True
        explain_uncaught(lambda: _open[-1].latest if _open else None, _save_newest_state, _better)
        atexit.register(_fail_at_exit)  # `start` registers this first, so it is called last


def _save_newest_state(error: BaseException) -> None:
    """At an uncaught error, save this process's newest state of the open run: a restart may resume from it."""
    if _open:
        _open[-1].restarts.save_newest(error)


def current() -> Run | None:
    """Return the open run of this process, or None."""
    return _open[-1] if _open and not _open[-1].closed else None


def _join(world: World, settings: Settings, init_method: str | None) -> tuple[World, torch.device]:
    """Join the default process group. Return the world with this process's local rank, and this process's device."""
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
        script = getattr(sys.modules["__main__"], "__file__", None)  # None in a notebook: use the current directory
        path = file_beside(script)
    layers = [("the script", given), ("the command line", overrides)]
    if path is not None:
        layers.insert(1, (str(path), read_file(path)))
    return resolve(*layers)


def _close_all() -> None:
    while _open:
        _open.pop().close()


def _close_at_exit() -> None:
    """Close the open run when the process exits.

    If an uncaught error ends the process, suppress further errors: closing the run may need a collective, and other
    ranks may have ended. The user should read the first error.
    """
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
    """Exit with code 1 if a checkpoint could not be written.

    An exception in an exit function leaves Python's exit code at 0, so the training would look complete.
    """
    if _unsaved:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the stream may be closed or None
                stream.flush()
        os._exit(1)


def _world(init_method: str | None, rank: int | None, world_size: int | None) -> World:
    if worlds.EXPORT in os.environ:
        raise UsageError(
            f"paceline export imports {os.environ[worlds.EXPORT]} for its model, but the import starts a run. Put the "
            'training under `if __name__ == "__main__":`.'
        )
    if rank is None and world_size is None and init_method is None:
        return worlds.from_env(os.environ)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise WorldError(
            f"start(init_method={init_method!r}, rank={rank}, world_size={world_size}): give all three, with "
            "0 <= rank < world_size, or none to use the launcher's."
        )
    if world_size > worlds.MOST_PROCESSES:
        raise WorldError(
            f"start(world_size={world_size}): a run may have at most {worlds.MOST_PROCESSES:,} processes. Correct it."
        )
    return World(rank, world_size, rank, world_size, 0, 1, "start()")


def _by_environment(world: World) -> World:
    """Take the local rank and size of a world from `start(rank=...)` from the environment, if they are set there."""
    if world.source != "start()":
        return world
    local_rank, local_size = worlds.local_place(os.environ, world.local_rank, world.local_size)
    return replace(world, local_rank=local_rank, local_size=local_size)


def _device(name: str | None, world: World, on_cpu: int) -> torch.device:
    """Choose this process's device and make it the current device.

    Args:
        on_cpu: number of ranks that use the CPU. They are the last ranks.
    """
    if world.rank >= world.size - on_cpu:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    device = device_choice.choose(name, None if accelerator is None else accelerator.type, count, world)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device
