"""Averages of a model's weights over the steps of a run, such as an EMA, by the functions of torch.optim.swa_utils.

An average lies where the weights lie. It is sharded where they are (fsdp, tensor), and a process of a pipeline averages
the weights of its own stage. The whole average is put together only to be used or saved:

1. `update`, after a step: each process averages the weights that it holds. Nothing travels.
2. `in_model`: the model has the average for a while, as for an evaluation or an export. What a process lacks of it
   comes from the others.
3. `before_save`, `state_dict`: whole on rank 0, by name, so that every strategy can read it.

Independent replicas (local_sgd) average their own weights. An EMA is linear in the weights, so that the mean of the
replicas' EMAs is the EMA of their mean weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.comm import collectives
from paceline.comm.dtensor import is_sharded, local, sharded_like, whole_on_main
from paceline.errors import CheckpointError, ModelError, SettingError, UsageError
from paceline.strategies.base import Strategy
from paceline.torch_private.core import foreach_mul_


class AveragedWeights:
    """The running average of a model's parameters; in float32 where they are of a lower precision. Buffers are the
    model's own. number: of the model, among those that are prepared. average: a function of swa_utils, (averages,
    current values, how many so far)."""

    def __init__(
        self, model: nn.Module, number: int, strategy: Strategy, average: Callable[[Any, Any, Any], None]
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._number, self._strategy, self._average = number, strategy, average
        self._means: dict[str, Tensor] = {}  # of the parameters that this process holds; sharded as these are
        self._whole: dict[str, Tensor] | None = None  # of all, for `state_dict`, from before_save to `update`
        self.count = 0  # how many values the average has

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average. The first ones are the average."""
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
        """The model has the average, within the context. Collective."""
        self._strategy.synchronize()
        self._strategy.make_whole()
        values = self._complete()
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.write(values)
        try:
            yield
        finally:
            self.write(before)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Put values, or the average, into the model. Collective without values."""
        if values is None:
            self._strategy.synchronize()
            self._strategy.make_whole()
            values = self._complete()
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    @torch.no_grad()
    def _complete(self) -> dict[str, Tensor]:
        """The average of all parameters, sharded where they are. The model is whole. Collective."""
        mesh = self._strategy.mesh
        if mesh.independent:
            means = {name: self._means.get(name, p).detach().clone() for name, p in self._parameters.items()}
            collectives.sum_all(list(means.values()))
            foreach_mul_(list(means.values()), 1 / collectives.size_of())
            return means
        if mesh.size("stage") > 1:  # one stage has each; the others add nothing to it
            means = {
                name: self._means[name].clone() if self._strategy.holds(p) else torch.zeros_like(_wide(p.detach()))
                for name, p in self._parameters.items()
            }
            collectives.sum_all(list(means.values()), mesh.group("stage"))
            return means
        self._check_alike()
        return self._means

    def _check_alike(self) -> None:
        """Raises ModelError where each process has an average of its own."""
        if collectives.size_of() == 1 or any(is_sharded(mean) for mean in self._means.values()):
            return
        unlike = collectives.digest_mismatch(self._means.items())
        if unlike:
            raise ModelError(
                f"the averaged weights are not the same on all processes, as of {unlike[0]!r}: the average was updated "
                "on some ranks only. Call its update() on every rank, outside of `if run.main:`."
            )

    def before_save(self) -> None:
        """Gather what other processes have. Collective."""
        mesh = self._strategy.mesh
        if any(is_sharded(mean) for mean in self._means.values()):
            self._whole = {
                name: whole_on_main(mean) if is_sharded(mean) else mean for name, mean in self._means.items()
            }
        elif (mesh.independent or mesh.size("stage") > 1) and self.count:
            self._strategy.make_whole()
            self._whole = self._complete()

    def state_dict(self) -> dict[str, Any]:
        weights = dict(self._means if self._whole is None else self._whole)
        return {"count": self.count, "model": self._number, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._whole = state["count"], None
        missing = self._parameters.keys() ^ state["weights"].keys()
        if self.count and missing:
            raise CheckpointError(f"the checkpoint's averaged weights are of another model: see {min(missing)!r}.")
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
    """The exponential moving average of a model's weights: what `run.ema` returns.

    After each update of the weights, average = decay x average + (1 - decay) x weights. It begins with the weights
    after the first update. Where `run.export`, `paceline.evaluate` or `run.predict` take a model, they take this too.
    """

    def __init__(
        self, model: nn.Module, number: int, strategy: Strategy, decay: float, steps: Callable[[], int]
    ) -> None:
        """steps: how many updates the run has made."""
        check_decay("run.ema", decay)
        self.model = model
        self._weights = AveragedWeights(model, number, strategy, get_ema_multi_avg_fn(decay))
        self._steps, self._last = steps, -1

    def update(self) -> None:
        """Takes the weights into the average. Call it after run.step. Where that made no update, since the global batch
        is not complete, it does nothing. So the average does not depend on how many micro-batches there are."""
        if self._steps() not in (0, self._last):
            self._last = self._steps()
            self._weights.update()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Within the context the model has the average, and after it its own weights again. All processes enter it. Do
        not train in it. Raises UsageError before the first update."""
        if not self._weights.count:
            raise UsageError(
                "the EMA has no weights yet: call its update() after run.step, in the loop over the training loader."
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
    """The model to use: for an average its model, which has the average meanwhile; for anything else itself."""
    if isinstance(model, ModelEMA):
        with model.in_model():
            yield model.model
    else:
        yield model


def check_decay(call: str, decay: object) -> None:
    """Raises SettingError for a decay that cannot be."""
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise SettingError(f"{call}(decay={decay!r}): how much of the average stays at each step: 0 or more, below 1.")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
