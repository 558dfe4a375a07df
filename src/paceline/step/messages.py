"""What run.backward and run.step say when they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from paceline.torch_private.core import BUILTIN_MODULE


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


def out_of_turn(begins: str, open_one: str, micro: int, micros: int) -> str:
    return (
        f"loader {begins!r} begins a global batch while that of loader {open_one!r} is not complete (micro-batch "
        f"{micro + 1} of {micros}). Loaders that take turns in one loop need the same number of micro-batches in a "
        "global batch: set micro_batch of each accordingly."
    )


def several_loaders(call: str, names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names))
    return (
        f"run.{call}: several training loaders are being iterated ({listed}): say which, with of=loader. A loss that "
        f"is a sum over batches of several loaders needs a call for each part:\n{_each_its_own(names, call)}"
    )


def _each_its_own(names: Sequence[str], call: str = "backward") -> str:
    given = "loss_{0}" if call == "backward" else "loss_fn_{0}, model, batch_{0}"
    lines = [(f"    run.{call}({given.format(i)}, of=...)", name) for i, name in enumerate(names, 1)]
    return "\n".join(f"{line}  # computed from a batch of {name!r}" for line, name in lines)


def sum_over_loaders(call: str, names: Sequence[str], parts: int) -> str:
    """names: of the loader that the call named, and of those whose batches have other shares."""
    return (
        f"run.{call}: this loss, of a batch of loader {names[0]!r}, is a sum of {parts} parts, each from a forward of "
        f"its own. It may have parts of batches of {', '.join(map(repr, names[1:]))} too, which would get a wrong "
        "weight: these global batches have other sizes. Make a call for each part, with the loader of that part; calls "
        f"add up until run.step:\n{_each_its_own(names, call)}\nOr give a sum and its count (total= with count=, in a "
        "closure paceline.Total), which is exact for parts of any loader."
    )


def unused_batches(unused: str, used: Sequence[str]) -> str:
    return (
        f"loader {unused!r} has yielded batches that had no run.backward, while updates were made from those of "
        f"{', '.join(map(repr, used))}, whose global batches have other sizes. If a loss is computed from batches of "
        "both, as by model(torch.cat([a, b])), its parts need a call each, with the loader of that part; calls add up "
        f"until run.step:\n{_each_its_own([*used, unused])}\n(with retain_graph=True in all but the last, if they "
        "have a forward in common). Else fetch a batch only when it is used, with next(); or make the loader with "
        "train=False, if no loss depends on its batches."
    )


def which_optimizer(prepared: int) -> str:
    return f"run.step(): {prepared} optimizers are prepared: say which, run.step(optimizer)."


def unprepared(optimizer: str) -> str:
    return f"this {optimizer} was not prepared: model, optimizer = run.prepare(model, optimizer)."


def outside_a_loop(call: str) -> str:
    return (
        f"run.{call} was called outside a loop over a training loader, so that the size of the global batch is not "
        "known. Iterate over run.loader(...), or what run.prepare(DataLoader) returned, and call it there."
    )


def empty_message(error: BaseException, total: int) -> str:
    examples = "1 example" if total == 1 else f"{total} examples"
    return (
        f"this rank's shard of the global batch is empty (all of it has {examples}), and the model or the loss cannot "
        f"take its zero-length batch: {type(error).__name__}: {error}. Leave out what needs a row where len(x) == 0 "
        "(x.max() becomes x.max() if len(x) else 0; torch.stack and pack_sequence need one too), or see that no "
        "shard is empty: a global_batch of at least the number of shards, and drop_last=True."
    )


DIRECT_BACKWARD = (
    "there are gradients that run.backward did not make, as by loss.backward() called directly: they are neither "
    "weighed by their share of the global batch nor combined over the processes. Write run.backward(loss) in its place "
    "(several calls add), and keep gradients of your own elsewhere (torch.autograd.grad), or clear them."
)


def not_reached(left: bool) -> str:
    what = ": the gradients that are there were left by an earlier one" if left else ""
    return (
        "run.step without backward: no run.backward of this global batch has reached this optimizer's parameters"
        f"{what}. Call run.backward(loss) for its loss, in place of loss.backward(), before this run.step; and see "
        "that the loss depends on its model (a detach() in between cuts it off)."
    )


def unstepped(name: str, step: int, epoch: int) -> str:
    return (
        f"loader {name!r} begins a global batch, but the gradients of the last one (step {step} of epoch {epoch}) were "
        "neither used by run.step nor cleared: this one's would be added to them. Call run.step(optimizer) in every "
        "turn of the loop, without a condition such as (i + 1) % 4 == 0: it acts when a global batch is complete. To "
        "accumulate over more examples raise global_batch=, with micro_batch= for the memory. To leave a batch out "
        "clear its gradients: optimizer.zero_grad()."
    )


def never_stepped(name: str) -> str:
    return (
        f"the last global batch of loader {name!r} has gradients that no run.step has used, and that were not cleared: "
        "they change no model. Call run.step(optimizer) after run.backward, in every turn of the loop."
    )


BY_HAND_APART = (
    "the script has used and cleared gradients without run.step, and no optimizer is prepared: the chosen strategy "
    "lets replicas train apart and averages them at run.step, so that they would never meet. Prepare an optimizer "
    "(torch.optim.SGD makes the same update) and call run.step(optimizer); or use --strategy ddp."
)

CLOSURE_OF_AN_OPTIMIZER = (
    "run.step: {0} computes the loss several times in a step. Give it a closure: run.step(optimizer, closure), where\n"
    "    def closure():\n"
    "        optimizer.zero_grad()\n"
    "        loss = criterion(model(input), target)\n"
    "        run.backward(loss)\n"
    "        return loss"
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


def batch_norm_cut(loader: str, global_batch: int, micro_batch: int) -> str:
    return (
        f"loader {loader!r}: micro_batch={micro_batch} cuts a global batch of {global_batch} into micro-batches (on "
        "few processes; it is refused on any number), and the model has batch norm, whose statistics are those of the "
        "whole global batch. Leave micro_batch out: each process computes its part at once, and the more processes "
        "there are the less memory each needs. Or use a normalisation within the example (GroupNorm, LayerNorm); or "
        "batch_norm='shard', which changes the model. Batch norm in evaluation mode takes micro-batches too."
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
    if (
        getattr(loss_fn, "__module__", "").startswith(("torch.nn", BUILTIN_MODULE))
        or type(loss_fn).__module__ == _LOSSES
    ):
        return (
            f"loss_fn={name}: it is called as loss_fn(model, batch), and not with an output and a target. Write\n"
            f"    {CLOSURE}"
        )
    return None


_LOSSES = nn.CrossEntropyLoss.__module__


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


def second_backward(call: str, error: BaseException) -> str | None:
    """What to say where a graph's second backward was refused by torch; None: this is another error."""
    text = str(error)
    if not any(words in text for words in ("through the graph a second time", "already unpacked once")):
        return None
    if call == "backward":
        remedy = (
            "Where several losses share a forward, give all calls but the last retain_graph=True, or add the losses: "
            "run.backward(a + b)"
        )
    else:
        remedy = (
            "Compute the whole loss in one closure, which may return a tuple of losses (they add); or call "
            "run.backward(loss, retain_graph=True), under a strategy that takes the loop form"
        )
    return (
        f"run.{call}: a part of this loss's graph has had its backward already, which freed what it had kept. "
        f"{remedy}. A tensor that is carried from batch to batch, as an RNN's hidden state, needs a detach(). "
        f"(torch: {text.splitlines()[0][:80]}...)"
    )


NOT_AS_YIELDED = (
    "run.forward_backward(loss_fn, model, batch): the batch is not as the loader yielded it. The chosen strategy "
    "computes several shards or micro-batches at once, whose batches are within it. Pass on what the loop got. Where "
    "the loss is computed from batches of several loaders, make a call for each, with of=loader; calls add up until "
    "run.step."
)

SAVED_IN_MID_BATCH = (
    "run.save in the middle of a global batch: its gradients are not part of a checkpoint. Call it after run.step, "
    "when that returned True (of updates that the script makes itself, when it has cleared the gradients)."
)

LOSS_OVER_YIELDS = (
    "run.backward: a part of this loss was computed before the loader's latest yield, and a part after it, so that it "
    "cannot be known of which batch it is a mean. Compute the whole loss (the model and the criterion) before the next "
    "batch is fetched; fetch it just before run.backward, or after run.step. If the loss is a sum over several "
    "batches, make a call for each part (calls add up until run.step)."
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

FETCHED_AHEAD_IN_TURNS = (
    "the loader was asked for the next batch before run.step, where one process computes several shards one after the "
    "other and the model has batch norm with statistics of each shard, which begin anew with each global batch. Fetch "
    "the next batch after run.step(optimizer)."
)

PREPARED_LATE = (
    "reproducible: a model with batch norm was prepared after the first training batch. All shards of a process "
    "compute such a model together, and so they must from the start: prepare it before the loop, or set "
    "batch_norm='shard', which changes the model."
)

CLEARED_BETWEEN = (
    "the gradients of earlier micro-batches of this global batch have been cleared, as by model.zero_grad(). Delete "
    "that call: run.step clears the gradients when it has used them."
)

NOT_IN_EVERY_MICRO_BATCH = (
    "run.step: an earlier micro-batch of this global batch made a backward call that its last one did not make, so "
    "that its gradient was never combined over the processes. Make the same backward calls in every micro-batch (a "
    "loss of zero is fine)."
)
