"""hvd.DistributedOptimizer: an optimizer whose gradients are averaged over all processes before its step."""

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
    """The base of distributed optimizers. `DistributedOptimizer` makes a class of it and the optimizer's own.

    Attributes:
        reducer: averages the gradients.
        backward_passes_per_step: of each parameter, before its gradient is sent.
    """

    reducer: GradientReducer
    _synchronized: bool  # was `synchronize` called since the last step?
    _skips: bool  # is this within `skip_synchronize`?

    @property
    def backward_passes_per_step(self) -> int:
        return self.reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on."""
        _check_passes(passes)
        self._refuse_under_way("set_backward_passes_per_step()")
        self.reducer.passes = passes
        self.reducer.reset()

    def synchronize(self) -> None:
        """Wait until the gradients are the average over all processes. All processes call it alike."""
        self.reducer.add(self.param_groups)  # layers may have been unfrozen
        self.reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step` does not wait for the gradients: `synchronize` was called before, to clip them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless that was done, and update. A closure's gradients are averaged after each call
        of it; the loss that it returns stays this process's own."""
        if closure is not None:
            return super().step(self._reduced(closure))
        if self._skips:
            if not self._synchronized and self.reducer.under_way:
                raise UsageError(
                    "optimizer.step() within optimizer.skip_synchronize(), and optimizer.synchronize() was not called: "
                    "each process would update with its own gradients. Call optimizer.synchronize() before."
                )
        else:
            if self._synchronized:
                warn(
                    "optimizer.step() after optimizer.synchronize() averages the gradients once more. Step within "
                    "`with optimizer.skip_synchronize():`."
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
        """As the optimizer's own; refused while gradients are being averaged."""
        self._refuse_under_way("zero_grad()")
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's own; refused while gradients are being averaged."""
        self._refuse_under_way("load_state_dict()")
        super().load_state_dict(state_dict)

    def _refuse_under_way(self, call: str) -> None:
        if self.reducer.under_way:
            raise UsageError(
                f"optimizer.{call} came after loss.backward() and before optimizer.step() or optimizer.synchronize(), "
                "while gradients are being averaged. Move it before the backward, or after the step. (If another "
                "model's loss reached these parameters, as a GAN's does, freeze them meanwhile: requires_grad_(False).)"
            )


# torch wraps an optimizer's `step` in what calls its hooks, when it is made and when it loads a state, unless it finds
# this mark. The optimizer's own `step`, which is called within, is wrapped already: hooks would be called twice.
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
    """An optimizer of the same class, with the same state, whose `step` averages the gradients over all processes.

    The average is over processes: it is the gradient of the mean over the global batch where every process's loss is a
    mean over equally many examples.

    Args:
        optimizer: from torch.optim, or of that interface.
        named_parameters: as model.named_parameters(); for messages, and to compare the processes' models.
        compression: hvd.Compression.none or fp16, or a Compressor.
        backward_passes_per_step: gradients of so many backward passes are added up before they are sent.
        op: hvd.Average or hvd.Sum.
        gradient_predivide_factor: gradients are divided by it before the sum, and the sum is multiplied by it over the
            number of processes: keeps 16-bit sums in range.
        num_groups: see groups.
        groups: how Horovod is to group gradients on their way. Gradients travel in buckets of about 25 MB here.
        sparse_as_dense: sparse gradients travel as dense ones.
        process_set: only hvd.global_process_set.

    Raises:
        SettingError: an argument that cannot be.
    """
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.DistributedOptimizer")
    if isinstance(optimizer, Distributed):
        raise SettingError(
            "hvd.DistributedOptimizer was given what it has returned before: gradients would be averaged twice. Give "
            "it the optimizer from torch.optim."
        )
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            f"hvd.DistributedOptimizer takes an optimizer of torch.optim, and was given {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS) and hvd_world.size() > 1:
        raise SettingError(
            "hvd.DistributedOptimizer: LBFGS decides by the loss that its closure returns, and each process has its "
            "own. Use run.step(optimizer, closure) of paceline.start(), where all get the mean."
        )
    _check_passes(backward_passes_per_step)
    reduction = _reduction(op, gradient_predivide_factor, compression, sparse_as_dense)
    names = {} if named_parameters is None else _names(optimizer, named_parameters)
    made: Any = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    distributed = made.__new__(made)
    # Without `step`, which a learning-rate scheduler may have put there: it would go past the averaging.
    vars(distributed).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed.reducer = GradientReducer(optimizer.param_groups, names, reduction, backward_passes_per_step)
    distributed._synchronized = distributed._skips = False
    return distributed


def _check_passes(passes: Any) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise SettingError(f"backward_passes_per_step={passes!r}: a whole number of at least 1.")


def _reduction(op: Any, predivide: float, compression: Any, sparse_as_dense: bool) -> Reduction:
    chosen = operation_of(op, "hvd.DistributedOptimizer")
    if chosen not in (Average, Sum):
        raise SettingError(
            f"hvd.DistributedOptimizer(op={op!r}): gradients are averaged or added: hvd.Average or hvd.Sum."
        )
    if predivide != 1.0 and (chosen is not Average or op == Adasum):
        raise SettingError(
            f"gradient_predivide_factor={predivide} splits the division of an average, and op={op!r} divides by "
            "nothing. Leave it out, or use op=hvd.Average."
        )
    if predivide <= 0:
        raise SettingError(f"gradient_predivide_factor={predivide}: a number above 0, such as 1.0 (nothing).")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise SettingError(
            f"compression={compression!r} has no compress and decompress. Give hvd.Compression.none or "
            "hvd.Compression.fp16, or a class of your own with both."
        )
    return Reduction(compression, chosen, float(predivide), sparse_as_dense)


def _names(optimizer: Optimizer, named_parameters: Any) -> dict[Tensor, str]:
    """The name of each parameter. Raises SettingError for names that do not fit the optimizer's parameters."""
    listed = list(named_parameters)
    if not listed:  # Horovod's way to say nothing, and what a generator that was used before gives
        raise SettingError(
            "named_parameters is empty: was model.named_parameters() used up before? Pass model.named_parameters()."
        )
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in listed):
        raise SettingError(
            "named_parameters is a sequence of pairs (name, parameter): pass model.named_parameters(), not "
            "model.parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in listed).items() if count > 1]
    if twice:
        raise SettingError(
            f"named_parameters has these names more than once: {', '.join(twice)}. Of several models put the model's "
            "name before each."
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
            f"the optimizer has {len(unnamed)} parameters that named_parameters does not name ({unnamed[0]} is the "
            "first). Pass the named parameters of every model that the optimizer updates."
        )
    return names
