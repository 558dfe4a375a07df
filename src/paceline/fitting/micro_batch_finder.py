"""find_micro_batch: the largest micro-batch that fits into memory, for a fixed global batch.

1. Copy model and optimizer together, and start a run, so that the processes can communicate.
2. Each process tries a size alone, without collectives (fitting/memory_trial.py), and catches an out-of-memory error.
3. All processes exchange their outcomes. A size fits if it fits on all processes. So all processes try the same sizes.
   At first, each size is about twice the previous one. Then they bisect between the largest size that fitted and the
   smallest size that did not.
4. Close the run, and restore the random generators.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm import mesh
from paceline.comm.mesh import world_group
from paceline.errors import ModelError, SettingError, UsageError, check_whole
from paceline.fitting.evaluate import LossFn
from paceline.fitting.memory_trial import Examples, MemoryTrial, Outcome
from paceline.fitting.model_loss import ModelLoss, used_columns
from paceline.fitting.trial_run import trial_run
from paceline.run import Run, parts_of
from paceline.step.preparable import needs_closure

_AS_FAST = 0.95  # fraction of the highest speed that suffices: a small gain is not worth more memory
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class MicroBatch:
    """One size that was tried. The same on every process."""

    micro_batch: int  # examples per forward on one device
    fits: bool  # on every process
    examples_per_second: float | None  # of the slowest process, without communication; None if it does not fit
    memory: int | None  # peak bytes of tensors on any accelerator; None on CPUs, and if it does not fit


@dataclass(frozen=True)
class MicroBatches:
    """The result of `find_micro_batch`, the same on every process. `print` shows it as a table."""

    tried: list[MicroBatch]  # from the smallest to the largest
    shard: int  # examples of a global batch per replica; the largest possible micro-batch

    @property
    def largest(self) -> int:
        """The largest micro-batch that fits on every process."""
        return max(one.micro_batch for one in self.tried if one.fits)

    @property
    def suggestion(self) -> int:
        """The smallest micro-batch that reaches 95% of the highest speed."""
        fitting = [(one.micro_batch, one.examples_per_second) for one in self.tried if one.examples_per_second]
        best = max(speed for _, speed in fitting)
        return min(size for size, speed in fitting if speed >= _AS_FAST * best)

    def __str__(self) -> str:
        lines = ["micro_batch  micro-batches / step  examples/s   memory"]
        for one in self.tried:
            begin = f"{one.micro_batch:11}  {-(-self.shard // one.micro_batch):20}"
            if one.examples_per_second is None:
                lines.append(f"{begin}  does not fit")
            else:
                memory = "" if one.memory is None else f"  {one.memory / 2**30:.2f} GiB"
                lines.append(f"{begin}  {one.examples_per_second:10.1f}{memory}")
        return "\n".join([*lines, f"largest {self.largest}, suggestion {self.suggestion}"])


def find_micro_batch(
    model: nn.Module,
    loss_fn: LossFn | None,
    train_set: Any,
    *,
    optimizer: torch.optim.Optimizer,
    global_batch: int,
    reserve_mb: float = 0.0,
    settings: dict[str, Any] | None = None,
    **loader_options: Any,
) -> MicroBatches:
    """Tries micro-batch sizes for this global batch: do they fit into memory, and how fast are they? The size never
    changes the trained model.

    Args:
        model, loss_fn, train_set, optimizer, global_batch, loader_options: as for `fit`. The model, the optimizer and
            the random generators stay unchanged. Keep the model on the CPU, as before `prepare`, because the trial
            moves a copy to the device.
        reserve_mb: megabytes per device to keep free for anything that the trial does not count.
        settings: arguments of paceline.start for the separate run, such as {"precision": "bf16"}.

    Each process tries sizes alone, on its device. A trial runs forward and backward passes of the whole model, with
    gradients and optimizer state, on the first training examples. It does not count memory that a strategy adds, or
    saves by sharding the model (docs/fit.md). Call find_micro_batch before paceline.start(), on every process.

    Raises SettingError for invalid arguments or if the smallest micro-batch does not fit, UsageError if a run is open,
    and any other error of the model or the loss.
    """
    check_whole("find_micro_batch", "global_batch", global_batch)
    if not isinstance(reserve_mb, (int, float)) or not 0 <= reserve_mb < float("inf"):
        raise SettingError(f"find_micro_batch(reserve_mb={reserve_mb!r}): pass a number of megabytes, 0 or more.")
    if "micro_batch" in loader_options:
        raise SettingError("find_micro_batch(micro_batch=...): this function finds the size. Remove the argument.")
    if needs_closure(optimizer):
        raise SettingError(
            f"find_micro_batch(optimizer={type(optimizer).__name__}): this optimizer evaluates the loss of the whole "
            "global batch, and works without micro-batches (run.step(optimizer, closure))."
        )
    if loss_fn is None:
        loss_fn, train_set = ModelLoss(), used_columns(train_set, model)
    with trial_run("find_micro_batch", model, optimizer, settings or {}) as (run, copied, its_optimizer):
        run.loader(
            train_set, **_whole(global_batch, loader_options)
        )  # raises the errors that `fit` would raise for these arguments
        examples = Examples(train_set, loader_options, run.settings, run.device)
        if not examples:
            raise SettingError("find_micro_batch: the data set or its sampler has no example to try.")
        shard = -(-global_batch // mesh.current().shards)
        alone = MemoryTrial(copied, its_optimizer, loss_fn, examples, run.settings, run.device, int(reserve_mb * 1e6))
        return MicroBatches(_tried(run, alone, _sizes(run, model, shard, global_batch), global_batch, shard), shard)


def _whole(global_batch: int, options: dict[str, Any]) -> dict[str, Any]:
    if options.get("batch_sampler") is not None:
        raise SettingError("find_micro_batch(batch_sampler=...): pass a global batch, and a sampler if you need one.")
    return {"global_batch": global_batch, "shuffle": options.get("sampler") is None, **options}


def _sizes(run: Run, model: nn.Module, shard: int, global_batch: int) -> list[int]:
    """The values of micro_batch to try, ascending. A shard is split into micro-batches of nearly equal sizes. So both
    micro_batch=20 and 16 split a shard of 32 into two micro-batches of 16. Such duplicates are left out."""
    if not any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return sorted({-(-shard // count) for count in range(1, shard + 1)})
    if parts_of(run).normalisation.choice == "global":
        return [global_batch]  # a smaller micro_batch is refused on any number of processes
    return sorted({-(-shard // count) for count in range(1, max(1, shard // 2) + 1)})  # one example has no variance


def search(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits, or None if the first size does not fit. sizes: ascending. The search assumes
    that all sizes below a fitting size fit too."""
    low, high, place = -1, len(sizes), 0  # sizes[low] fits, sizes[high] does not
    while place < high:
        if not fits(sizes[place]):
            high = place
            break
        low = place
        place = next((at for at, size in enumerate(sizes) if size >= 2 * sizes[low]), max(len(sizes) - 1, low + 1))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low] if low >= 0 else None


def _tried(run: Run, alone: MemoryTrial, sizes: list[int], global_batch: int, shard: int) -> list[MicroBatch]:
    """Phases 2 and 3. A process never computes more than its shard at once."""
    found: dict[int, MicroBatch] = {}
    failures: list[str] = []  # messages of the ranks where the last size did not fit

    def fits(size: int) -> bool:
        examples = min(size, shard)
        each = _agree(examples, alone.run(examples, run.rank))
        failures[:] = [f"rank {rank}: {outcome.message}" for rank, outcome in enumerate(each) if not outcome.fits]
        if failures:
            found[size] = MicroBatch(size, False, None, None)
            return False
        memory = [outcome.memory for outcome in each if outcome.memory is not None]
        speed = examples / max(outcome.seconds for outcome in each)
        found[size] = MicroBatch(size, True, speed, max(memory, default=None))
        return True

    if search(sizes, fits) is None:
        listed = "\n".join(f"  {line}" for line in failures)
        if len(sizes) == 1 and sizes[0] > 1:
            raise ModelError(
                f"find_micro_batch(global_batch={global_batch}): the shard of one replica, {shard} examples, does "
                "not fit into memory, and cannot be split into micro-batches, since the model has batch norm over "
                "the global batch. Use more devices, a normalisation of each example (GroupNorm, LayerNorm), or "
                f"batch_norm='shard', which changes the model.\n{listed}"
            )
        raise SettingError(
            f"find_micro_batch(global_batch={global_batch}): not even micro_batch={sizes[0]} fits into memory with the "
            "model, its gradients and the optimizer's state. Try --precision bf16, activation checkpointing or shorter "
            "examples. A strategy that shards the model (fsdp, pipeline, tensor) needs less on each device than this "
            f"counts.\n{listed}"
        )
    return [found[size] for size in sorted(found)]


def _agree(size: int, outcome: Outcome) -> list[Outcome]:
    """Exchange and return the outcomes of all processes. If a process had an error other than out-of-memory, it raises
    that error, and the other processes raise an error that names it."""
    described = "" if outcome.error is None else _described(outcome.error)
    each: list[Any] = world_group().gather((tuple(outcome._replace(error=None)), described))
    if outcome.error is not None:
        raise outcome.error
    for rank, (_, text) in enumerate(each):
        if text:
            raise UsageError(f"find_micro_batch: rank {rank} failed at micro_batch={size}: {text}")
    return [Outcome(*fields) for fields, _ in each]


def _described(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename}, line {last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"
