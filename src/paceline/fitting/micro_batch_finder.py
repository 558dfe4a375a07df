"""find_micro_batch: the largest micro-batch that fits into memory, at a global batch that stays what it is.

1. Copy model and optimizer together, and start a run, in which the processes can agree.
2. Each process tries a size by itself, without a collective operation (fitting/memory_trial.py), and catches its error.
3. All processes tell each other what came of it. A size fits if it fits on all of them. So they try the same sizes:
   first each about twice the one before, then, between the last that fitted and the first that did not, the middle.
4. Close the run, and put the random generators back.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm import collectives, mesh
from paceline.errors import ModelError, SettingError, UsageError, check_whole
from paceline.fitting.evaluate import LossFn
from paceline.fitting.memory_trial import Examples, MemoryTrial, Outcome
from paceline.fitting.model_loss import ModelLoss, used_columns
from paceline.fitting.trial_run import trial_run
from paceline.run import Run
from paceline.step.preparable import needs_closure

_AS_FAST = 0.95  # of the highest speed: less of it is not worth more memory
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class MicroBatch:
    """A size that was tried, the same on every process."""

    micro_batch: int  # examples of one forward on one device
    fits: bool  # on every process
    examples_per_second: float | None  # of the slowest process, without what processes exchange; None: it does not fit
    memory: int | None  # the most bytes of tensors on any accelerator; None on CPUs, and where it does not fit


@dataclass(frozen=True)
class MicroBatches:
    """What `find_micro_batch` has seen, the same on every process. `print` shows it as a table."""

    tried: list[MicroBatch]  # from the smallest to the largest
    shard: int  # examples that one replica has of a global batch: no micro-batch is larger

    @property
    def largest(self) -> int:
        """The largest micro-batch that fits on every process."""
        return max(one.micro_batch for one in self.tried if one.fits)

    @property
    def suggestion(self) -> int:
        """The smallest micro-batch of those tried whose speed is within 5% of the highest."""
        fitting = [(one.micro_batch, one.examples_per_second) for one in self.tried if one.examples_per_second]
        best = max(speed for _, speed in fitting)
        return min(size for size, speed in fitting if speed >= _AS_FAST * best)

    def __str__(self) -> str:
        lines = ["micro_batch  micro-batches a step  examples/s   memory"]
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
    """Which micro-batches fit into memory at this global batch, and how fast they are. None of them changes the model.

    Args:
        model, loss_fn, train_set, optimizer, global_batch, loader_options: as for `fit`. The model, the optimizer and
            the random generators stay as they are. The model is best on the CPU, as before `prepare`: a copy is tried.
        reserve_mb: megabytes on each device that stay free of the trial, for what it does not count.
        settings: arguments of paceline.start for the run that it makes, such as {"precision": "bf16"}.

    Each process tries sizes by itself, on its device: forward and backward passes of the whole model, with gradients
    and optimizer state, of micro-batches of the first training examples. It does not count what a strategy keeps
    besides, or saves by cutting the model (docs/fit.md). Call it before paceline.start(), on every process.

    Raises SettingError for arguments that cannot be and where the smallest micro-batch does not fit, UsageError in an
    open run, and whatever else the model or the loss raises.
    """
    check_whole("find_micro_batch", "global_batch", global_batch)
    if not isinstance(reserve_mb, (int, float)) or not 0 <= reserve_mb < float("inf"):
        raise SettingError(f"find_micro_batch(reserve_mb={reserve_mb!r}): megabytes, from 0 on, are needed.")
    if "micro_batch" in loader_options:
        raise SettingError("find_micro_batch(micro_batch=...): that is what it finds. Leave it out.")
    if needs_closure(optimizer):
        raise SettingError(
            f"find_micro_batch(optimizer={type(optimizer).__name__}): it evaluates the loss of the whole global batch "
            "itself, and takes no micro-batches (run.step(optimizer, closure))."
        )
    if loss_fn is None:
        loss_fn, train_set = ModelLoss(), used_columns(train_set, model)
    with trial_run("find_micro_batch", model, optimizer, settings or {}) as (run, copied, its_optimizer):
        run.loader(
            train_set, **_whole(global_batch, loader_options)
        )  # raises what `fit` would raise of these arguments
        examples = Examples(train_set, loader_options, run.settings, run.device)
        if not examples:
            raise SettingError("find_micro_batch: the data set, or its sampler, has no example to try.")
        shard = -(-global_batch // mesh.current().shards)
        alone = MemoryTrial(copied, its_optimizer, loss_fn, examples, run.settings, run.device, int(reserve_mb * 1e6))
        return MicroBatches(_tried(run, alone, _sizes(run, model, shard, global_batch), global_batch, shard), shard)


def _whole(global_batch: int, options: dict[str, Any]) -> dict[str, Any]:
    if options.get("batch_sampler") is not None:
        raise SettingError("find_micro_batch(batch_sampler=...): give a sampler, or neither, and the global batch.")
    return {"global_batch": global_batch, "shuffle": options.get("sampler") is None, **options}


def _sizes(run: Run, model: nn.Module, shard: int, global_batch: int) -> list[int]:
    """The values of micro_batch to try, ascending. Micro-batches of a shard are as equal as can be, so
    that with a shard of 32, micro_batch=20 makes two of 16, as micro_batch=16 does."""
    if not any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return sorted({-(-shard // count) for count in range(1, shard + 1)})
    if run.settings.batch_norm == "global" and not mesh.current().independent:
        return [global_batch]  # a smaller micro_batch is refused on any number of processes
    return sorted({-(-shard // count) for count in range(1, max(1, shard // 2) + 1)})  # one example has no variance


def search(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the ascending sizes that fits, if all below one that fits do; None where the first does not."""
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
    """Phases 2 and 3. A process computes no more than its shard at once, whatever the size."""
    found: dict[int, MicroBatch] = {}
    wanting: list[str] = []  # of the last size that did not fit: who said what

    def fits(size: int) -> bool:
        examples = min(size, shard)
        each = _agree(examples, alone.run(examples, run.rank))
        wanting[:] = [f"rank {rank}: {outcome.message}" for rank, outcome in enumerate(each) if not outcome.fits]
        if wanting:
            found[size] = MicroBatch(size, False, None, None)
            return False
        memory = [outcome.memory for outcome in each if outcome.memory is not None]
        speed = examples / max(outcome.seconds for outcome in each)
        found[size] = MicroBatch(size, True, speed, max(memory, default=None))
        return True

    if search(sizes, fits) is None:
        told = "\n".join(f"  {line}" for line in wanting)
        if len(sizes) == 1 and sizes[0] > 1:
            raise ModelError(
                f"find_micro_batch(global_batch={global_batch}): the part of one replica, {shard} examples, does "
                "not fit into memory, and it cannot be cut into micro-batches, since the model has batch norm over the "
                "global batch. Use more devices, a normalisation within the example (GroupNorm, LayerNorm), or "
                f"batch_norm='shard', which changes the model.\n{told}"
            )
        raise SettingError(
            f"find_micro_batch(global_batch={global_batch}): not even micro_batch={sizes[0]} fits into memory with the "
            "model, its gradients and the optimizer's state. Try --precision bf16, activation checkpointing or shorter "
            "examples; a strategy that cuts the model (fsdp, pipeline, tensor) needs less on each device than this "
            f"counts.\n{told}"
        )
    return [found[size] for size in sorted(found)]


def _agree(size: int, own: Outcome) -> list[Outcome]:
    """Every process's outcome. Raises an error that is not for want of memory: this process's own, or one that says
    which other process had one."""
    told = "" if own.error is None else _described(own.error)
    each: list[Any] = collectives.gather_objects((tuple(own._replace(error=None)), told))
    if own.error is not None:
        raise own.error
    for rank, (_, text) in enumerate(each):
        if text:
            raise UsageError(f"find_micro_batch: rank {rank} failed at micro_batch={size}: {text}")
    return [Outcome(*outcome) for outcome, _ in each]


def _described(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename}, line {last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"
