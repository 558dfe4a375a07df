"""hvd.DistributedOptimizer: an optimizer that averages the gradients over all processes before its step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import SettingError, UsageError, warn
from paceline.horovod import hvd_world
from paceline.horovod.gradient_compression import Compression
from paceline.horovod.gradient_reducer import GradientReducer, Reduction
from paceline.horovod.hvd_collectives import operation_of
from paceline.horovod.hvd_world import Adasum, Average, Sum


class Distributed(Optimizer):
    """The base class of distributed optimizers. `DistributedOptimizer` combines it with the class of the optimizer.

    Attributes:
        reducer: averages the gradients.
        backward_passes_per_step: backward passes of each parameter before its gradient is sent.
    """

    reducer: GradientReducer
    _synchronized: bool  # whether `synchronize` was called since the last step
    _skips: bool  # whether `skip_synchronize` is active

    @property
    def backward_passes_per_step(self) -> int:
        return self.reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, from the next step on."""
        _check_passes(passes)
        self._refuse_under_way("set_backward_passes_per_step()")
        self.reducer.passes = passes
        self.reducer.reset()

    def synchronize(self) -> None:
        """Wait until the gradients are averaged over all processes. All processes must call it."""
        self.reducer.add(self.param_groups)  # for layers that were unfrozen
        self.reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block, `step` does not average the gradients. Call `synchronize` first, for example to clip them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients (except within `skip_synchronize`), and update the parameters.

        With a closure, the gradients are averaged after each call of the closure. The returned loss is local to this
        process.
        """
        if closure is not None:
            return super().step(self._reduced(closure))
        if self._skips:
            if not self._synchronized and self.reducer.under_way:
                raise UsageError(
                    "optimizer.step() within optimizer.skip_synchronize(), but optimizer.synchronize() was not called: "
                    "each process would update with its local gradients. Call optimizer.synchronize() first."
                )
        else:
            if self._synchronized:
                warn(
                    "optimizer.step() after optimizer.synchronize() averages the gradients a second time. Call step() "
                    "within `with optimizer.skip_synchronize():`."
                )
            self.synchronize()
        self._synchronized = False
        return super().step()

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises UsageError while gradients are being averaged."""
        self._refuse_under_way("zero_grad()")
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state. Raises UsageError while gradients are being averaged."""
        self._refuse_under_way("load_state_dict()")
        super().load_state_dict(state_dict)

    def _refuse_under_way(self, call: str) -> None:
        if self.reducer.under_way:
            raise UsageError(
                f"optimizer.{call} was called after loss.backward() and before optimizer.step() or "
                "optimizer.synchronize(), while gradients are being averaged. Move it before the backward, or after "
                "the step. (If another model's loss reached these parameters, as in a GAN, freeze them meanwhile: "
                "requires_grad_(False).)"
            )


# When an optimizer is created or loads a state, torch wraps `step` to call the hooks, unless `step` has this mark. This
# `step` needs no hooks: it calls the `step` of the optimizer's class, which calls the hooks already.
Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """Return an optimizer of the same class and state that averages the gradients over all processes in `step`.

    The average is over processes. It equals the gradient of the mean over the global batch only if every process's loss
    is a mean over the same number of examples.

    Args:
        optimizer: an optimizer of torch.optim, or another torch.optim.Optimizer.
        named_parameters: model.named_parameters(), for messages and to compare the processes' models.
        compression: hvd.Compression.none or fp16, or a Compressor.
        backward_passes_per_step: the number of backward passes to accumulate before gradients are sent.
        op: hvd.Average or hvd.Sum.
        gradient_predivide_factor: divide the gradients by this factor before the sum, and multiply the sum by factor /
            (number of processes). This keeps 16-bit sums in range.
        num_groups: ignored, like groups.
        groups: Horovod's groups of gradients. Ignored: Paceline sends gradients in buckets of about 25 MB.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: only hvd.global_process_set.

    Raises:
        SettingError: an argument has an invalid value.
    """
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.DistributedOptimizer")
    if isinstance(optimizer, Distributed):
        raise SettingError(
            "hvd.DistributedOptimizer received a DistributedOptimizer: gradients would be averaged twice. Pass the "
            "optimizer from torch.optim."
        )
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            f"hvd.DistributedOptimizer received {type(optimizer).__name__}. Pass an optimizer of torch.optim."
        )
    if isinstance(optimizer, torch.optim.LBFGS) and hvd_world.size() > 1:
        raise SettingError(
            "hvd.DistributedOptimizer: LBFGS depends on the loss of its closure, which differs between processes. Use "
            "run.step(optimizer, closure) of paceline.start(), which averages the loss."
        )
    _check_passes(backward_passes_per_step)
    reduction = _reduction(op, gradient_predivide_factor, compression, sparse_as_dense)
    names = {} if named_parameters is None else _names(optimizer, named_parameters)
    made: Any = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    distributed = made.__new__(made)
    # Skip `step`, which a learning-rate scheduler may have set: it would bypass the averaging.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed.reducer = GradientReducer(optimizer.param_groups, names, reduction, backward_passes_per_step)
    distributed._synchronized = distributed._skips = False
    return distributed


def _check_passes(passes: Any) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise SettingError(f"backward_passes_per_step={passes!r}: must be a whole number, at least 1.")


def _reduction(op: Any, predivide: float, compression: Any, sparse_as_dense: bool) -> Reduction:
    chosen = operation_of(op, "hvd.DistributedOptimizer")
    if chosen not in (Average, Sum):
        raise SettingError(
            f"hvd.DistributedOptimizer(op={op!r}): gradients can only be averaged or added: hvd.Average or hvd.Sum."
        )
    if predivide != 1.0 and (chosen is not Average or op == Adasum):
        raise SettingError(
            f"gradient_predivide_factor={predivide} splits the division of an average, but op={op!r} does not divide. "
            "Leave it out, or use op=hvd.Average."
        )
    if predivide <= 0:
        raise SettingError(f"gradient_predivide_factor={predivide}: must be above 0. 1.0 has no effect.")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise SettingError(
            f"compression={compression!r} has no compress and decompress. Use hvd.Compression.none or "
            "hvd.Compression.fp16, or a class with both methods."
        )
    return Reduction(compression, chosen, float(predivide), sparse_as_dense)


def _names(optimizer: Optimizer, named_parameters: Any) -> dict[Tensor, str]:
    """Return parameter -> name. Raises SettingError if the names do not fit the optimizer's parameters."""
    listed = list(named_parameters)
    if not listed:  # Horovod accepts this as "no names", but it may be an exhausted generator
        raise SettingError(
            "named_parameters is empty. Was the generator used before? Pass model.named_parameters() again."
        )
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in listed):
        raise SettingError(
            "named_parameters must be pairs (name, parameter). Pass model.named_parameters(), not model.parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in listed).items() if count > 1]
    if twice:
        raise SettingError(
            f"named_parameters has these names more than once: {', '.join(twice)}. With several models, prefix each "
            "name with the model's name."
        )
    names = {parameter: name for name, parameter in listed}
    unnamed = [
        f"group {g}, parameter {n}"
        for g, group in enumerate(optimizer.param_groups)
        for n, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if unnamed:
        raise SettingError(
            f"named_parameters lacks {len(unnamed)} parameters of the optimizer ({unnamed[0]} is the first). Pass the "
            "named parameters of every model that the optimizer updates."
        )
    return names
