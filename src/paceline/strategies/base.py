"""What every strategy is: where model state lives, and how gradients are combined. Nothing else.

A strategy is a mesh (comm/mesh.py), a plan (batch_plan.py), a gradient store (gradient_store.py) and a few methods. It
is a LoopStrategy, for which the step runs the user's code and hands over losses; or a ClosureStrategy, which runs the
user's closure itself, on several replicas or stages. Phases of one global batch, as the step drives them:

  1. for each micro-batch, `backward` or `forward_backward`; the last one completes the reduction, so that the store
     holds the sum over all shards;
  2. `finish`, once before an update: whatever must be complete for it;
  3. `step`, the update itself.

Weights. Losses reach a strategy with the weight that makes their plain sum over all shards and micro-batches the mean
over the global batch. A strategy whose engine averages instead of adding undoes that by scaling the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Mesh
from paceline.strategies.batch_plan import BatchPlan
from paceline.strategies.gradient_store import GradientStore
from paceline.world import World

Weight = float | Tensor
"""How much of the global batch a loss stands for: a number, or a 0-dim tensor on the loss's device."""


@dataclass(slots=True)
class Piece:
    """One micro-batch of one shard."""

    shard: int
    micro: int
    count: int  # of its examples
    batch: Any  # as collate made it


@dataclass(slots=True)
class Term:
    """One addend of a loss."""

    value: Tensor  # a scalar
    # None: value is a mean over the piece's examples. Else it is a sum over `count` things, to be divided by their
    # number in the global batch.
    count: Weight | None


Weights = list[list[Weight | None]]
"""For each piece, a weight for each of its terms; None leaves the term out of this pass."""

Kind = tuple[int, int | None]
"""Which backward call of a step one is: its number in the micro-batch, and the identity of the first parameter that it
is to touch (None: it may touch all). Calls of one kind are to reach the same parameters in every step. A penalty that a
GAN's loop adds in every fourth step moves the numbers of the calls after it, but not the optimizers that they name."""


def kind_of(call: int, inputs: Sequence[Tensor] | None) -> Kind:
    """The kind of the backward call of this number, which is to touch these parameters only (None: all)."""
    return call, id(inputs[0]) if inputs else None


class Backward(NamedTuple):
    """A backward pass: of several losses, each with its weight."""

    losses: Sequence[Tensor]  # scalars
    weights: Sequence[Weight]
    final: bool  # whether it is of the last micro-batch, and completes the reduction
    kind: Kind
    number: int = 0  # of this pass in its call, which makes several where a loss has several denominators
    inputs: Sequence[Tensor] | None = None  # the only parameters to touch (None: all)
    retain_graph: bool = False  # whether another pass over the same graphs follows


class Work(NamedTuple):
    """A micro-batch for a strategy that runs the user's closure itself."""

    model: Any  # what the closure is called with: a model, or a tuple, list or dict of models
    pieces: Sequence[Piece]
    compute: Callable[[Any, Piece, torch.device], list[Term]]  # runs the closure there
    # For each backward pass that the terms of each piece need: its weights, and whether the graph must be kept. It is
    # called once, between the forwards and the backwards, may communicate, and must be exhausted.
    passes: Callable[[list[list[Term]]], Iterator[tuple[Weights, bool]]]
    autocast: Callable[[], AbstractContextManager[Any]]  # the run's precision, for what runs outside of the closure
    final: bool  # whether it is the last micro-batch of the global batch, whose backward completes the reduction
    call: int  # number of the backward call in this micro-batch
    inputs: Sequence[Tensor] | None  # the only parameters to touch (None: all)
    total: int  # examples in the whole global batch


class Strategy(ABC):
    """What both kinds share. The constructor's arguments are the world, the device, and options."""

    mesh: Mesh
    plan: BatchPlan  # another one when processes are lost or come
    store: GradientStore
    device: torch.device  # on which the user's own models are

    @abstractmethod
    def __init__(self, world: World, device: torch.device) -> None:
        """Options are further keyword arguments. Raises SettingError for a world that it cannot work in."""

    @abstractmethod
    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Takes charge of these models and optimizers, alike on every replica. Called again when some are added."""

    def finish(self) -> None:
        """The global batch is complete: called before its updates. Gradients are final when it returns."""
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update."""
        optimizer.step()

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        """One update of an optimizer that evaluates loss and gradient itself, several times. False, with nothing done,
        where that would not be exact."""
        return False

    def explain(self, error: Exception) -> Exception | None:
        """What to raise in place of an error of the user's forward, a backward or an update, where this strategy knows
        what it means."""
        return None

    def completed(self, optimizer: torch.optim.Optimizer, updated: bool) -> int:
        """How many steps, as large as a global batch, all processes together have made since the last call. updated:
        whether `step` was called since."""
        return int(updated)

    def synchronize(self) -> None:
        """Makes the models of independent replicas one, before somebody looks at them. Collective."""
        return None

    def synchronized(self) -> bool:
        """Whether the models of all replicas are the same now. Asks nobody."""
        return True

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """{"models": [name -> whole tensor], "optimizers": [named state]}, in the order of `setup`; under further keys
        what is a strategy's own, which others ignore. Collective. Ranks other than 0 may be given tensors without
        memory (device "meta")."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` of any strategy returned, the same on every process. Collective."""

    def close(self) -> None:
        """Releases threads, hooks and buffers."""
        return None


class LoopStrategy(Strategy):
    """A strategy to which losses are handed. The step runs the user's closure, or the user their loop."""

    @abstractmethod
    def backward(self, work: Backward) -> None:
        """Adds the gradients of weight x loss, summed over all shards when `final` (or always, where the store says
        so)."""


class ClosureStrategy(Strategy):
    """A strategy that runs the user's closure itself. Its plan is bundled; the loop form is refused."""

    @abstractmethod
    def forward_backward(self, work: Work) -> list[list[Term]]:
        """Runs the closure on every piece, and its backward. Returns the terms, detached, of each piece."""


_backward = torch.autograd.backward  # as it is before a run watches direct calls of it (train/guards.py)
_gradients: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def as_gradient(weight: Weight, loss: Tensor) -> Tensor:
    """The weight as the gradient that `backward` starts from: a tensor of the loss's shape, dtype and device."""
    if isinstance(weight, Tensor):
        return weight.to(device=loss.device, dtype=loss.dtype).reshape(loss.shape)
    if loss.dim():
        return torch.full_like(loss, weight, requires_grad=False)
    key = (weight, loss.dtype, loss.device)
    gradient = _gradients.get(key)
    if gradient is None:  # the weights of a run are few: making such a tensor costs a tenth of a small backward
        if len(_gradients) >= 64:
            _gradients.clear()
        gradient = _gradients[key] = torch.full((), weight, dtype=loss.dtype, device=loss.device)
    return gradient


def backward_here(work: Backward, factor: float = 1) -> None:
    """torch's backward, in this process: adds the gradients, times a factor, to `.grad`."""
    if len(work.losses) == 1:  # what most are, without the list
        gradients = [as_gradient(work.weights[0] * factor, work.losses[0])]
    else:
        gradients = [as_gradient(weight * factor, loss) for loss, weight in zip(work.losses, work.weights, strict=True)]
    _backward(work.losses, gradients, inputs=work.inputs, retain_graph=work.retain_graph)
