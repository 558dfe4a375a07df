"""Average a model's weights over the steps of a run, for example as an EMA (functions: torch.optim.swa_utils).

An average is sharded like the weights (fsdp, tensor), and a process of a pipeline averages the weights of its stage.
The whole average is assembled only for use or for saving:

1. `update`, after a step: each process averages the weights that it holds. No communication.
2. `in_model`: the model temporarily has the average, for an evaluation or an export. Processes receive the parts that
   they do not hold.
3. `before_save`, `state_dict`: rank 0 gets the whole average, by parameter name, so that every strategy can load it.

Independent replicas (local_sgd) average their weights separately. An EMA is linear in the weights, so the mean of the
replicas' EMAs is the EMA of their mean weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.comm import same_bits
from paceline.comm.dtensor import is_sharded, local, sharded_like, whole_on_main
from paceline.comm.mesh import world_group
from paceline.errors import CheckpointError, ModelError, SettingError, UsageError
from paceline.strategies.base import Strategy
from paceline.torch_private.core import foreach_mul_


class AveragedWeights:
    """The running average of a model's parameters, in float32 if they have a lower precision. Buffers are not averaged.

    number: the number of the model among the prepared models.
    average: a function of swa_utils that adds values to averages in place: average(averages, current values, count of
    values so far).
    """

    def __init__(
        self, model: nn.Module, number: int, strategy: Strategy, average: Callable[[Any, Any, Any], None]
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._number, self._strategy, self._average = number, strategy, average
        self._means: dict[str, Tensor] = {}  # averages of this process's parameters, sharded like the parameters
        self._whole: dict[str, Tensor] | None = None  # averages of all parameters, from before_save until `update`
        self.count = 0  # the number of values in the average

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average. The first call copies them."""
        self._whole = None
        held = {name: p for name, p in self._parameters.items() if self._strategy.holds(p)}
        if not self.count:
            self._means = {name: _wide(p.detach()).clone() for name, p in held.items()}
        else:
            means = [local(self._means[name]) for name in held]
            current = [_wide(local(p.detach())) for p in held.values()]
            self._average(means, current, self.count)
        self.count += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """A context in which the model has the average. Collective."""
        self._strategy.synchronize()
        self._strategy.gather_weights()
        values = self._complete()
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.write(values)
        try:
            yield
        finally:
            self.write(before)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Write values into the model. None: write the average; this is collective."""
        if values is None:
            self._strategy.synchronize()
            self._strategy.gather_weights()
            values = self._complete()
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    @torch.no_grad()
    def _complete(self) -> dict[str, Tensor]:
        """Return the averages of all parameters, sharded like them. Call gather_weights first. Collective."""
        mesh = self._strategy.mesh
        if mesh.independent:
            means = {name: self._means.get(name, p).detach().clone() for name, p in self._parameters.items()}
            world_group().sum_tensors(list(means.values()))
            foreach_mul_(list(means.values()), 1 / world_group().size)
            return means
        if mesh.size("stage") > 1:  # one stage holds each parameter; the others add zeros
            means = {
                name: self._means[name].clone() if self._strategy.holds(p) else torch.zeros_like(_wide(p.detach()))
                for name, p in self._parameters.items()
            }
            mesh.group("stage").sum_tensors(list(means.values()))
            return means
        self._check_alike()
        return self._means

    def _check_alike(self) -> None:
        """Raises ModelError if the processes have different averages."""
        if world_group().size == 1 or any(is_sharded(mean) for mean in self._means.values()):
            return
        unlike = same_bits.digest_mismatch(self._means.items(), world_group())
        if unlike:
            raise ModelError(
                f"the averaged weights differ between processes (for example {unlike[0]!r}), since some ranks did not "
                "update the average. Call its update() on every rank, outside of `if run.main:`."
            )

    def before_save(self) -> None:
        """Gather the parts of the average from other processes. Collective."""
        mesh = self._strategy.mesh
        if any(is_sharded(mean) for mean in self._means.values()):
            self._whole = {
                name: whole_on_main(mean) if is_sharded(mean) else mean for name, mean in self._means.items()
            }
        elif (mesh.independent or mesh.size("stage") > 1) and self.count:
            self._strategy.gather_weights()
            self._whole = self._complete()

    def state_dict(self) -> dict[str, Any]:
        weights = dict(self._means if self._whole is None else self._whole)
        return {"count": self.count, "model": self._number, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._whole = state["count"], None
        missing = self._parameters.keys() ^ state["weights"].keys()
        if self.count and missing:
            raise CheckpointError(
                f"the checkpoint's averaged weights belong to a different model: {min(missing)!r} is in only one of "
                "the two. Use the same model as in the checkpoint, or another checkpoint."
            )
        self._means = (
            {
                name: sharded_like(_wide(p.detach()), whole) if is_sharded(p) else whole.to(p.device, copy=True)
                for (name, p), whole in zip(
                    self._parameters.items(), (state["weights"][name] for name in self._parameters), strict=True
                )
                if self._strategy.holds(p)
            }
            if self.count
            else {}
        )


class ModelEMA:
    """The exponential moving average of a model's weights, as returned by `run.ema`.

    After each update of the weights, average = decay x average + (1 - decay) x weights. The average begins with the
    weights after the first update. `run.export`, `paceline.evaluate` and `run.predict` accept it in place of a model.
    """

    def __init__(
        self, model: nn.Module, number: int, strategy: Strategy, decay: float, steps: Callable[[], int]
    ) -> None:
        """Make the average. steps: returns the number of updates of the run."""
        check_decay("run.ema", decay)
        self.model = model
        self._weights = AveragedWeights(model, number, strategy, get_ema_multi_avg_fn(decay))
        self._steps, self._last = steps, -1

    def update(self) -> None:
        """Add the weights to the average. Call it after run.step.

        Does nothing if run.step made no update, since the global batch is not complete. So the average does not depend
        on the number of micro-batches.
        """
        if self._steps() not in (0, self._last):
            self._last = self._steps()
            self._weights.update()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """A context in which the model has the average. Afterwards its weights are restored.

        All processes enter it. Do not train in it. Raises UsageError before the first update.
        """
        if not self._weights.count:
            raise UsageError(
                "the EMA has no weights yet. Call its update() after run.step, in the loop over the training loader."
            )
        with self._weights.in_model():
            yield

    def before_save(self) -> None:
        self._weights.before_save()

    def state_dict(self) -> dict[str, Any]:
        return {**self._weights.state_dict(), "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = state["last"]
        self._weights.load_state_dict(state)


@contextmanager
def weights_of(model: Any) -> Iterator[Any]:
    """A context that yields `model`. For a ModelEMA it yields the EMA's model, which temporarily has the average."""
    if isinstance(model, ModelEMA):
        with model.in_model():
            yield model.model
    else:
        yield model


def check_decay(call: str, decay: object) -> None:
    """Raises SettingError unless 0 <= decay < 1."""
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise SettingError(
            f"{call}(decay={decay!r}): give the fraction of the average that each step keeps, at least 0 and below 1."
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
