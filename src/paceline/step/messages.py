"""The error messages of run.backward, run.forward_backward and run.step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from paceline.torch_private.core import BUILTIN_MODULE


def without_backward(parameters: Sequence[Tensor]) -> str:
    if any(p.grad is not None for p in parameters):
        return (
            "run.step: there are gradients, but run.backward was not called for this batch. loss.backward() was called "
            "directly, so its gradients are neither weighted by their share of the global batch nor combined over the "
            "processes. Call run.backward(loss) instead."
        )
    return (
        "run.step without backward: no gradient has reached this optimizer's parameters. Call run.backward(loss) or "
        "run.forward_backward(loss_fn, model, batch) before it, in the same iteration of the loop."
    )


def out_of_turn(begins: str, open_one: str, micro: int, micros: int) -> str:
    return (
        f"loader {begins!r} begins a global batch while the global batch of loader {open_one!r} is not complete "
        f"(micro-batch {micro + 1} of {micros}). Loaders that alternate in one loop need the same number of "
        "micro-batches per global batch: set micro_batch= of each accordingly."
    )


def several_loaders(call: str, names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names))
    return (
        f"run.{call}: several training loaders are being iterated ({listed}). Name the loader of the loss with "
        f"of=loader. If the loss sums over batches of several loaders, make one call per loader:\n"
        f"{_one_call_each(names, call)}"
    )


def _one_call_each(names: Sequence[str], call: str = "backward") -> str:
    given = "loss_{0}" if call == "backward" else "loss_fn_{0}, model, batch_{0}"
    lines = [(f"    run.{call}({given.format(i)}, of=...)", name) for i, name in enumerate(names, 1)]
    return "\n".join(f"{line}  # computed from a batch of {name!r}" for line, name in lines)


def sum_over_loaders(call: str, names: Sequence[str], parts: int) -> str:
    """names: first the loader of the call, then the loaders with a different share of their global batch."""
    return (
        f"run.{call}: this loss of loader {names[0]!r} is a sum of {parts} parts from separate forwards. If a part "
        f"comes from a batch of {', '.join(map(repr, names[1:]))}, it would get a wrong weight, since these global "
        "batches have different sizes. Make one call per part, with the loader of that part; calls add up until "
        f"run.step:\n{_one_call_each(names, call)}\nOr give a sum and its count (total= with count=; in a closure "
        "paceline.Total), which is exact for parts of any loader."
    )


def unused_batches(unused: str, used: Sequence[str]) -> str:
    return (
        f"loader {unused!r} has yielded batches without a run.backward, while updates used batches of "
        f"{', '.join(map(repr, used))}, and their global batches have different sizes. If one loss is computed from "
        "batches of both, as by model(torch.cat([a, b])), make one call per part, with the loader of that part; calls "
        f"add up until run.step:\n{_one_call_each([*used, unused])}\n(if the parts share a forward, with "
        "retain_graph=True in all but the last). Otherwise fetch a batch only when it is used, with next(). If no loss "
        "depends on the loader's batches, make it with train=False."
    )


def which_optimizer(prepared: int) -> str:
    return f"run.step(): {prepared} optimizers are prepared. Name one: run.step(optimizer)."


def unprepared(optimizer: str) -> str:
    return f"this {optimizer} is not prepared. Write model, optimizer = run.prepare(model, optimizer)."


def outside_a_loop(call: str) -> str:
    return (
        f"run.{call} was called outside a loop over a training loader, so the size of the global batch is not known. "
        "Call it in a loop over run.loader(...), or over the loader that run.prepare(DataLoader) returned."
    )


def empty_message(error: BaseException, total: int) -> str:
    examples = "1 example" if total == 1 else f"{total} examples"
    return (
        f"this rank's shard of the global batch is empty (the global batch has {examples}), and the model or the loss "
        f"fails on a zero-length batch: {type(error).__name__}: {error}. Skip operations that need a row if len(x) == "
        "0 (write x.max() if len(x) else 0; torch.stack and pack_sequence need a row too). Or avoid empty shards: use "
        "a global_batch of at least the number of shards, and drop_last=True."
    )


DIRECT_BACKWARD = (
    "there are gradients that run.backward did not make, for example from a direct loss.backward(). They are neither "
    "weighted by their share of the global batch nor combined over the processes. Call run.backward(loss) instead "
    "(several calls add up). Compute other gradients with torch.autograd.grad, or clear them."
)


def not_reached(left: bool) -> str:
    what = " (its gradients are left from an earlier global batch)" if left else ""
    return (
        "run.step without backward: no run.backward of this global batch has reached this optimizer's parameters"
        f"{what}. Call run.backward(loss), not loss.backward(), before this run.step, and check that the loss depends "
        "on the optimizer's model (a detach() in between breaks the graph)."
    )


def unstepped(name: str, step: int, epoch: int) -> str:
    return (
        f"loader {name!r} begins a global batch, but the gradients of the last global batch (step {step} of epoch "
        f"{epoch}) were neither used by run.step nor cleared, so the new gradients would be added to them. Call "
        "run.step(optimizer) in every iteration of the loop, without a condition such as (i + 1) % 4 == 0: it acts "
        "when a global batch is complete. To accumulate over more examples raise global_batch=, with micro_batch= to "
        "limit memory. To skip a batch clear its gradients: optimizer.zero_grad()."
    )


def never_stepped(name: str) -> str:
    return (
        f"the gradients of the last global batch of loader {name!r} were neither used by run.step nor cleared, so they "
        "change no model. Call run.step(optimizer) after run.backward, in every iteration of the loop."
    )


MANUAL_UPDATES_OF_REPLICAS = (
    "the script has used and cleared gradients without run.step, and no optimizer is prepared. The chosen strategy "
    "trains independent replicas and averages them at run.step, so here they would never be averaged. Prepare an "
    "optimizer (torch.optim.SGD makes the same update) and call run.step(optimizer), or use --strategy ddp."
)

CLOSURE_OF_AN_OPTIMIZER = (
    "run.step: {0} computes the loss several times per step. Give it a closure: run.step(optimizer, closure), where\n"
    "    def closure():\n"
    "        optimizer.zero_grad()\n"
    "        loss = criterion(model(input), target)\n"
    "        run.backward(loss)\n"
    "        return loss"
)


ONE_VALUE = "Expected more than 1 value per channel when training"
"""The beginning of batch norm's error about a single example. torch's error and Paceline's begin in the same way."""


DROP_LAST = "drop_last=True"


def one_value_message(examples: int, total: int) -> str:
    if total == 1:
        return (
            "batch norm needs more than one example, but this global batch has only one (often the last of an epoch). "
            f"Write run.loader(..., {DROP_LAST}), or choose a global_batch that does not leave a single example over."
        )
    return (
        f"batch norm needs more than one example, but this process computes {examples} of the {total} examples of this "
        "global batch at once. Use a larger global_batch (and micro_batch), with drop_last=True in case the last "
        "global batch is short. Or use batch_norm='global', which takes its statistics over the whole global batch."
    )


def batch_norm_split(loader: str, global_batch: int, micro_batch: int) -> str:
    return (
        f"loader {loader!r}: micro_batch={micro_batch} splits a global batch of {global_batch} into micro-batches, "
        "but the model has batch norm with statistics over the whole global batch. (Enough processes would avoid the "
        "split, but micro_batch is refused on any number.) Leave micro_batch out: each process then computes its "
        "shard at once, and more processes need less memory each. Or normalise within each example (GroupNorm, "
        "LayerNorm). Or set batch_norm='shard', which changes the model. Batch norm in evaluation mode allows "
        "micro-batches."
    )


CLOSURE = "def loss_fn(model, batch): x, y = batch; return F.cross_entropy(model(x), y)"


def wrong_closure(loss_fn: Any, model: Any) -> str | None:
    """A message if loss_fn is a loss of torch, or was swapped with the model; None otherwise."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if isinstance(loss_fn, nn.Module) and not isinstance(model, nn.Module) and callable(model):
        return (
            f"loss_fn is a module ({name}), but the model is not. Did you swap them? Write "
            "run.forward_backward(loss_fn, model, batch), or paceline.fit(model, loss_fn, train_set, ...)."
        )
    if (
        getattr(loss_fn, "__module__", "").startswith(("torch.nn", BUILTIN_MODULE))
        or type(loss_fn).__module__ == _LOSSES
    ):
        return (
            f"loss_fn={name}: a loss_fn is called as loss_fn(model, batch), not with an output and a target. Write\n"
            f"    {CLOSURE}"
        )
    return None


_LOSSES = nn.CrossEntropyLoss.__module__


def under_no_grad(call: str) -> str:
    return (
        f"run.{call} was called under torch.no_grad() or inference_mode(), where there are no gradients. Move it out "
        "of that block. To evaluate, call only the model, or use paceline.evaluate."
    )


CLOSURE_NEEDED = (
    "run.backward: the chosen strategy computes several shards or micro-batches at once, so it needs a function that "
    "computes the loss from a batch. Write\n"
    "    def loss_fn(model, batch): images, labels = batch; return F.cross_entropy(model(images), labels)\n"
    "    for batch in loader:\n"
    "        loss = run.forward_backward(loss_fn, model, batch)\n"
    "or choose a strategy with one replica per process, such as ddp, without `reproducible`."
)


def second_backward(call: str, error: BaseException) -> str | None:
    """A message for torch's error about a second backward through a graph; None for other errors."""
    text = str(error)
    if not any(words in text for words in ("through the graph a second time", "already unpacked once")):
        return None
    if call == "backward":
        remedy = (
            "If several losses share a forward, pass retain_graph=True in all calls but the last, or add the losses: "
            "run.backward(a + b)"
        )
    else:
        remedy = (
            "Compute the whole loss in one closure, which may return a tuple of losses (they add up). Or call "
            "run.backward(loss, retain_graph=True), under a strategy that supports the loop form"
        )
    return (
        f"run.{call}: part of this loss's graph has already had its backward, which freed the saved tensors. {remedy}. "
        "A tensor that is carried from batch to batch, such as an RNN's hidden state, needs a detach(). "
        f"(torch: {text.splitlines()[0][:80]}...)"
    )


NOT_AS_YIELDED = (
    "run.forward_backward(loss_fn, model, batch): this is not the batch that the loader yielded. Under the chosen "
    "strategy, which computes several shards or micro-batches at once, that object holds all their batches. Pass it "
    "unchanged. If the loss is computed from batches of several loaders, make one call per loader, with of=loader; "
    "calls add up until run.step."
)

SAVED_IN_MID_BATCH = (
    "run.save was called in the middle of a global batch, whose gradients a checkpoint does not hold. Call run.save "
    "after run.step has returned True. If the script makes the updates itself, call it after clearing the gradients."
)

LOSS_OVER_YIELDS = (
    "run.backward: part of this loss was computed before the loader's latest yield and part after it, so its batch is "
    "not known. Compute the whole loss (the model and the criterion) before you fetch the next batch: fetch just "
    "before run.backward, or after run.step. If the loss is a sum over several batches, make one call per part (calls "
    "add up until run.step)."
)

LOSS_OF_AN_EARLIER_YIELD = (
    "this loss belongs to an earlier batch that is already finished: a later batch has had a backward, or the next "
    "batch was fetched after the update of this batch. Make all backward calls of a batch before the first backward "
    "call of the next batch."
)

FETCHED_AHEAD = (
    "the script fetched further batches before it computed the loss of an earlier batch that it still holds, so the "
    "batch of this loss is not known. Compute the loss of a batch before you fetch the next batch (the loader's "
    "workers already prefetch: num_workers=, prefetch_factor=). Or pass the batch as yielded to the closure form, "
    "run.forward_backward(loss_fn, model, batch), which knows it."
)

FETCHED_AHEAD_IN_TURNS = (
    "the script fetched the next batch before run.step, while this process computes several shards in sequence and "
    "the model has batch norm with statistics of each shard, which are reset at each global batch. Fetch the next "
    "batch after run.step(optimizer)."
)

PREPARED_LATE = (
    "reproducible: a model with batch norm was prepared after the first training batch. All shards of a process "
    "compute such a model together, from the first batch on. Prepare it before the loop, or set batch_norm='shard', "
    "which changes the model."
)

CLEARED_BETWEEN = (
    "the gradients of earlier micro-batches of this global batch were cleared, for example by model.zero_grad(). "
    "Delete that call: run.step clears the gradients after use."
)

NOT_IN_EVERY_MICRO_BATCH = (
    "run.step: an earlier micro-batch of this global batch made a backward call that its last micro-batch did not "
    "make, so its gradient was never combined over the processes. Make the same backward calls in every micro-batch "
    "(a loss of zero is fine)."
)
