"""What every strategy is: where model state lives, and how gradients are combined. Nothing else.

A strategy is a mesh (comm/mesh.py), a plan (batch_plan.py), a gradient store (gradient_store.py) and a few methods. It
is a LoopStrategy, which is given losses, since the step runs the user's code; or a ClosureStrategy, which runs the
user's closure itself, on several replicas or stages. The phases of one global batch, which the step drives:

  1. for each micro-batch, `backward` or `forward_backward`; the last one completes the reduction, so that the store
     holds the sum over all shards;
  2. `finish`, once, before the updates: gradients become final;
  3. `step`, one update of one optimizer.

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
from paceline.data.batch_plan import BatchPlan, Piece
from paceline.strategies.gradient_store import GradientStore
from paceline.world import World

Weight = float | Tensor
"""How much of the global batch a loss stands for: a number, or a 0-dim tensor on the loss's device."""


@dataclass(slots=True)
class Term:
    """One addend of a loss."""

    value: Tensor  # a scalar
    # None: value is a mean over the piece's examples. Else it is a sum over `count` things, to be divided by their
    # number in the global batch.
    count: Weight | None

    def detached(self) -> Term:
        return Term(self.value.detach(), self.count)


Weights = list[list[Weight | None]]
"""For each piece, a weight for each of its terms; None leaves the term out of this pass."""

Kind = tuple[int, int | None]
"""Identifies a backward call of a step: its number in the micro-batch, and the identity of the first parameter that it
may change (None: it may change all). Calls of one kind must use the same parameters in every step. The number alone is
not enough: a penalty that a GAN's loop adds in every fourth step shifts the numbers of the calls after it."""


def kind_of(call: int, inputs: Sequence[Tensor] | None) -> Kind:
    """The kind of the backward call of this number, which may change these parameters only (None: all)."""
    return call, id(inputs[0]) if inputs else None


class Backward(NamedTuple):
    """A backward pass, of one loss or several."""

    losses: Sequence[Tensor]  # scalars
    gradients: Sequence[Tensor]  # what the backward of each loss starts from: its weight, as a tensor like the loss
    final: bool  # whether this is the last micro-batch, whose backward completes the reduction
    kind: Kind
    number: int = 0  # of this pass; a call makes several where a loss has several denominators
    inputs: Sequence[Tensor] | None = None  # the only parameters to change (None: all)
    retain_graph: bool = False  # whether another pass over the same graphs follows


class Work(NamedTuple):
    """A micro-batch for a strategy that runs the user's closure itself."""

    model: Any  # what the closure is called with: a model, or a tuple, list or dict of models
    pieces: Sequence[Piece]
    compute: Callable[[Any, Piece, torch.device], list[Term]]  # runs the closure on a device
    # (terms of each piece) -> for each backward pass its weights, and whether the graph must be kept. Called once,
    # between the forwards and the backwards. It may communicate; its iterator must be exhausted.
    passes: Callable[[list[list[Term]]], Iterator[tuple[Weights, bool]]]
    autocast: Callable[[], AbstractContextManager[Any]]  # the run's precision, for code outside of the closure
    final: bool  # whether this is the last micro-batch, whose backward completes the reduction
    call: int  # number of the backward call in this micro-batch
    inputs: Sequence[Tensor] | None  # the only parameters to change (None: all)
    total: int  # examples in the whole global batch


class Strategy(ABC):
    """What both kinds share. The arguments of a constructor are the world, the device, and options."""

    mesh: Mesh
    plan: BatchPlan  # `setup` may replace it by another one
    store: GradientStore
    device: torch.device  # where the user's own models are
    models: Sequence[nn.Module] = ()  # as `setup` was given them
    optimizers: Sequence[torch.optim.Optimizer] = ()

    @abstractmethod
    def __init__(self, world: World, device: torch.device) -> None:
        """Options are further keyword arguments. Raises SettingError for a world that the strategy cannot work in."""

    @abstractmethod
    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Prepares models and optimizers, the same on every replica. Called again, with all, when some are added."""

    def finish(self) -> None:
        """Called before the updates of a complete global batch. Gradients are final when it returns."""
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update."""
        optimizer.step()

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        """One update of an optimizer that evaluates loss and gradient itself, several times. Where that would not be
        exact, does nothing and returns False."""
        return False

    def explain(self, error: Exception) -> Exception | None:
        """A better error to raise in place of one of the user's forward, a backward or an update; None: there is
        none."""
        return None

    def carrier(self) -> str:
        """What carries gradients between processes, for the line at the start of a run; "": torch.distributed does."""
        return ""

    def completed(self, optimizer: torch.optim.Optimizer, updated: bool) -> int:
        """The number of steps, as large as a global batch, that all processes together have made since the last call.
        updated: whether `step` was called since."""
        return int(updated)

    def check_call(self, call: str) -> None:
        """Raises UsageError where not all processes can take part in a call now. call: as the script writes it."""
        return None

    def synchronize(self) -> None:
        """Makes the models of independent replicas equal, before an evaluation or a checkpoint. Collective."""
        return None

    def make_whole(self) -> None:
        """Brings to this process the weights that others hold for it (a pipeline's stages), until the next step. What
        is sharded stays so. Collective."""
        return None

    def holds(self, parameter: Tensor) -> bool:
        """Whether this process updates the parameter, or its shard of it."""
        return True

    def synchronized(self) -> bool:
        """Whether the models of all replicas are equal now. Communicates nothing."""
        return True

    def steps_to_meeting(self) -> int:
        """After how many more steps all processes have next waited for each other; 1 where each step does."""
        return 1

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """{"models": [name -> whole tensor], "optimizers": [named state]}, in the order of `setup`. Further keys are
        the strategy's own; others ignore them. Collective. Ranks other than 0 may get tensors without memory (on
        "meta")."""

    def own_state(self) -> dict[str, Any] | None:
        """What `state_dict` returns, where this process holds all of it; None where it holds a part. Tensors are the
        live ones. Communicates nothing."""
        return None

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` of any strategy returned, the same on every process. Collective."""

    def close(self) -> None:
        """Releases threads, hooks and buffers."""
        return None


class LoopStrategy(Strategy):
    """A strategy that is given losses: the step runs the user's closure, or the user runs a loop."""

    @abstractmethod
    def backward(self, work: Backward) -> None:
        """Adds the gradients of weight x loss. They are summed over all shards when `work.final`; always, where the
        store has `reduces_each`."""


class ClosureStrategy(Strategy):
    """A strategy that runs the user's closure itself. Its plan is bundled; the loop form is refused."""

    @abstractmethod
    def forward_backward(self, work: Work) -> list[list[Term]]:
        """Runs the closure and its backward on every piece. Returns the detached terms of each piece."""


torch_backward = torch.autograd.backward
"""As it is before a run watches direct calls of it (step/guards.py)."""

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


def backward_here(work: Backward) -> None:
    """torch's backward, in this process: adds the gradients to `.grad`."""
    torch_backward(work.losses, work.gradients, inputs=work.inputs, retain_graph=work.retain_graph)
