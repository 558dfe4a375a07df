"""What run.backward and run.step say when they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def without_backward(parameters: Sequence[Tensor]) -> str:
    if any(p.grad is not None for p in parameters):
        return (
            "run.step: there are gradients, but run.backward was not called for this batch: loss.backward() was called "
            "directly, and its gradients are neither weighed by their share of the global batch nor combined over the "
            "processes. Write run.backward(loss) in its place."
        )
    return (
        "run.step without backward: no gradient has reached this optimizer's parameters. Call run.backward(loss), or "
        "run.forward_backward(loss_fn, model, batch), in the same turn of the loop before it."
    )


def empty_message(error: BaseException) -> str:
    return (
        f"this rank's shard of the global batch is empty, and the model or the loss cannot take its zero-length batch: "
        f"{type(error).__name__}: {error}. Let it (view(x.size(0), -1) becomes flatten(1)), or see that no shard is "
        "empty: a global_batch of at least the number of shards, and drop_last=True."
    )


ONE_VALUE = "Expected more than 1 value per channel when training"
"""How torch's batch norm, and ours, begins what it says to a single example."""


DROP_LAST = "drop_last=True"


def one_value_message(examples: int, total: int) -> str:
    if total == 1:
        return (
            "batch norm needs more than one example, and this global batch has one, as the last of an epoch may. Write "
            f"run.loader(..., {DROP_LAST}), or choose a global_batch that leaves no single example over."
        )
    return (
        f"batch norm needs more than one example, and of this global batch of {total} examples this process computes "
        f"{examples} at once. Take a larger global_batch (and micro_batch), with drop_last=True for a short last one; "
        "or batch_norm='global', whose statistics are those of the whole global batch."
    )


CLOSURE = "def loss_fn(model, batch): x, y = batch; return F.cross_entropy(model(x), y)"


def wrong_closure(loss_fn: Any, model: Any) -> str | None:
    """What is wrong with a loss_fn that could not be called, where it is one of torch's, or something else's place."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if isinstance(loss_fn, nn.Module) and not isinstance(model, nn.Module) and callable(model):
        return (
            f"loss_fn is a module ({name}), and the model is none: are they in the other's place? Write "
            "run.forward_backward(loss_fn, model, batch), and paceline.fit(model, loss_fn, train_set, ...)."
        )
    if getattr(loss_fn, "__module__", "").startswith(("torch.nn", "torch._C")) or type(loss_fn).__module__ == _LOSSES:
        return (
            f"loss_fn={name}: it is called as loss_fn(model, batch), and not with an output and a target. Write\n"
            f"    {CLOSURE}"
        )
    return None


_LOSSES = nn.CrossEntropyLoss.__module__


def cannot_be_sent(loader: str, error: BaseException) -> str:
    return (
        f"loader {loader!r}: num_workers starts processes that are not forked from this one (the spawn or forkserver "
        f"method), and its data set, collate_fn or worker_init_fn cannot be sent to them: {error}. A lambda, or a "
        "function or class that is defined within another, is the usual reason: define it at the top of a module, or "
        "write num_workers=0, or multiprocessing_context='fork'."
    )


def under_no_grad(call: str) -> str:
    return (
        f"run.{call} under torch.no_grad() or inference_mode(): nothing would have a gradient. Take it out of that "
        "block; to evaluate, call the model alone, or paceline.evaluate."
    )


CLOSURE_NEEDED = (
    "run.backward: the chosen strategy computes several shards or micro-batches at once, and must be told how to get "
    "a loss from a batch. Write\n"
    "    def loss_fn(model, batch): images, labels = batch; return F.cross_entropy(model(images), labels)\n"
    "    for batch in loader:\n"
    "        loss = run.forward_backward(loss_fn, model, batch)\n"
    "or choose a strategy with one replica a process, such as ddp, without `reproducible`."
)

CANNOT_BE_UNPACKED = (
    "this batch holds several collated batches, since the chosen strategy computes several shards or micro-batches at "
    "once (with `reproducible`, where the model has batch norm over the global batch): it cannot be unpacked in the "
    "loop. Move the loss into a function,\n"
    "    def loss_fn(model, batch): images, labels = batch; return F.cross_entropy(model(images), labels)\n"
    "and call\n"
    "    loss = run.forward_backward(loss_fn, model, batch)\n"
    "in place of the forward and run.backward; or choose a strategy with one replica a process, such as ddp, without "
    "`reproducible`."
)

LOST_BETWEEN_UPDATES = (
    "a process died between two updates of one global batch, of which the first has been made: it cannot be computed "
    "anew. Restore the last checkpoint."
)

SAVED_IN_MID_BATCH = (
    "run.save in the middle of a global batch: its gradients are not part of a checkpoint. Call it after run.step, "
    "when that returned True."
)
