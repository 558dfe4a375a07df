"""What run.backward and run.step say when they refuse."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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


def outside_a_loop(call: str) -> str:
    return (
        f"run.{call} was called outside a loop over a training loader, so that the size of the global batch is not "
        "known. Iterate over run.loader(...), or what run.prepare(DataLoader) returned, and call it there."
    )


def empty_message(error: BaseException) -> str:
    return (
        f"this rank's shard of the global batch is empty, and the model or the loss cannot take its zero-length batch: "
        f"{type(error).__name__}: {error}. Let it (view(x.size(0), -1) becomes flatten(1)), or see that no shard is "
        "empty: a global_batch of at least the number of shards, and drop_last=True."
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

LOSS_OVER_YIELDS = (
    "run.backward: a part of this loss was computed before the loader's latest yield, and a part after it, so that it "
    "cannot be known of which batch it is a mean. Compute the whole loss (the model and the criterion) before the next "
    "batch is fetched; fetch it just before run.backward, or after run.step."
)

LOSS_OF_AN_EARLIER_YIELD = (
    "this loss is of a batch whose turn is over: a loss of a later batch has had its backward, or the next batch was "
    "fetched after this one's update. Make all backward calls of a batch before the first one of the next."
)

FETCHED_AHEAD = (
    "the loader was asked for further batches before the loss of an earlier one was computed, and the script still "
    "has that one: it cannot be known of which batch this loss is a mean. Compute the loss of a batch before the next "
    "one is fetched (the loader's workers fetch ahead by themselves: num_workers=, prefetch_factor=); or let the "
    "closure get the batch as the loader yielded it, run.forward_backward(loss_fn, model, batch), by which it is known."
)

FETCHED_AHEAD_AND_ELASTIC = (
    "the loader was asked for the next batch before run.step, and the chosen strategy may have to compute the batch at "
    "hand once more when a process is lost. Fetch the next batch after run.step(optimizer)."
)

FETCHED_AHEAD_IN_TURNS = (
    "the loader was asked for the next batch before run.step, where one process computes several shards one after the "
    "other and the model has batch norm with statistics of each shard, which begin anew with each global batch. Fetch "
    "the next batch after run.step(optimizer)."
)
