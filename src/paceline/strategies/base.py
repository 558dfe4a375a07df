"""The interface of a strategy. It decides only where model state is stored, and how gradients are combined.

A strategy has a mesh (comm/mesh.py), a plan (batch_plan.py), a gradient store (gradient_store.py) and a few methods.
There are two kinds. A LoopStrategy receives each loss after the user's code has computed it. A ClosureStrategy runs the
user's closure itself, on several replicas or stages. The step drives these phases for one global batch:

  1. for each micro-batch, `backward` or `forward_backward`; the last one completes the reduction, so that the store
     holds the sum over all shards;
  2. `finish`, once, before the updates: gradients become final;
  3. `step`, one update of one optimizer.

Weights. A strategy receives losses with weights. Added over all shards and micro-batches, the weighted losses give the
mean over the global batch. If a strategy's engine averages instead of adding, the store's `factor` undoes that.
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
from paceline.data.batch_plan import BatchPlan
from paceline.data.bundle import Piece
from paceline.data.shard_sizes import ShardSizes
from paceline.strategies.gradient_store import GradientStore
from paceline.world import World

Weight = float | Tensor
"""A loss's share of the global batch: a number, or a 0-dim tensor on the loss's device."""


@dataclass(slots=True)
class Term:
    """One addend of a loss."""

    value: Tensor  # a scalar
    # None: value is a mean over the piece's examples. Otherwise value is a sum over `count` items, to be divided by the
    # number of items in the global batch.
    count: Weight | None

    def detached(self) -> Term:
        return Term(self.value.detach(), self.count)


Weights = list[list[Weight | None]]
"""For each piece, a weight for each of its terms; None leaves the term out of this pass."""

Kind = tuple[int, int | None]
"""Identifies a backward call of a step: (its number in the micro-batch, the id of the first parameter that may receive
a gradient, or None if all may). Calls of one kind must use the same parameters in every step. The number alone is not
enough: a penalty that a GAN adds in every fourth step shifts the numbers of later calls."""


def kind_of(call: int, inputs: Sequence[Tensor] | None) -> Kind:
    """The kind of backward call number `call`, which gives gradients only to `inputs` (None: to all parameters)."""
    return call, id(inputs[0]) if inputs else None


class Backward(NamedTuple):
    """A backward pass of one or several losses."""

    losses: Sequence[Tensor]  # scalars
    gradients: Sequence[Tensor]  # the starting gradient of each loss: its weight, in the loss's shape and dtype
    final: bool  # whether this is the last micro-batch; its backward completes the reduction
    kind: Kind
    number: int = 0  # the number of this pass; a loss with several denominators needs several passes
    inputs: Sequence[Tensor] | None = None  # the only parameters that receive gradients (None: all)
    retain_graph: bool = False  # whether another pass over the same graphs follows


class Work(NamedTuple):
    """A micro-batch for a ClosureStrategy."""

    model: Any  # the closure's first argument: a model, or a tuple, list or dict of models

    pieces: Sequence[Piece]
    compute: Callable[[Any, Piece, torch.device], list[Term]]  # runs the closure on a device
    # Takes the terms of each piece, and yields for each backward pass (its weights, whether to keep the graph). Call it
    # once, between the forwards and the backwards, and exhaust the iterator. It may communicate.
    passes: Callable[[list[list[Term]]], Iterator[tuple[Weights, bool]]]
    autocast: Callable[[], AbstractContextManager[Any]]  # the run's precision, for code outside of the closure
    final: bool  # whether this is the last micro-batch; its backward completes the reduction
    call: int  # the number of the backward call in this micro-batch
    inputs: Sequence[Tensor] | None  # the only parameters that receive gradients (None: all)
    total: int  # the number of examples in the global batch


class Strategy(ABC):
    """The interface of both kinds. A constructor takes the world, the device, and options."""

    mesh: Mesh
    plan: BatchPlan  # `setup` may replace it
    store: GradientStore
    device: torch.device  # of the user's models
    models: Sequence[nn.Module] = ()  # as passed to `setup`
    optimizers: Sequence[torch.optim.Optimizer] = ()

    @property
    def parameter_mesh(self) -> Mesh:
        """The mesh whose dimensions parameters are split over."""
        return self.mesh

    @abstractmethod
    def __init__(self, world: World, device: torch.device) -> None:
        """Options are further keyword arguments. Raises SettingError if the strategy cannot work in this world."""

    @abstractmethod
    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Prepare models and optimizers, the same on every replica.

        When the script prepares more of them, this is called again with all models and optimizers.
        """

    def split_by(self, sizes: ShardSizes) -> bool:
        """Split global batches into shards of these sizes from now on; False: the strategy cannot.

        Called before the run makes a loader.
        """
        return False

    def fill_with(self, fill: Callable[[nn.Module], None]) -> bool:
        """Whether `setup` accepts models with tensors on "meta", allocates this process's part of such a model, and
        then calls fill(model). False: `setup` gets models that are whole and filled. Called before `setup`."""
        return False

    def finish(self) -> None:
        """Make gradients final. Called once per global batch, before its updates."""
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make one update."""
        optimizer.step()

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        """Make one update of an optimizer that calls the closure several times, and return True.

        If the update would not be exact, do nothing and return False.
        """
        return False

    def explain(self, error: Exception) -> Exception | None:
        """Replace an error of a forward, a backward or an update by a better error. None: keep the error."""
        return None

    def carrier(self) -> str:
        """The transport of gradients between processes, for the run's first line of output; "": torch.distributed."""
        return ""

    def completed(self, optimizer: torch.optim.Optimizer, updated: bool) -> int:
        """The number of steps, of one global batch each, that all processes together made since the last call.

        updated: whether `step` was called since the last call.
        """
        return int(updated)

    def check_call(self, call: str) -> None:
        """Raises UsageError if some process cannot take part in this collective call now.

        call: the call as the script writes it.
        """
        return None

    def synchronize(self) -> None:
        """Make the models of independent replicas equal, before an evaluation or a checkpoint. Collective."""
        return None

    def gather_weights(self) -> None:
        """Fetch the weights of this replica's other processes (a pipeline's other stages). Collective.

        The weights stay until the next step. Sharded weights stay sharded.
        """
        return None

    def holds(self, parameter: Tensor) -> bool:
        """Whether this process updates the parameter, or its shard of it."""
        return True

    def synchronized(self) -> bool:
        """Whether the models of all replicas are equal now. Does not communicate."""
        return True

    def steps_to_synchronization(self) -> int:
        """The number of steps until all processes next wait for each other; 1 if they do so in each step."""
        return 1

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """{"models": [name -> whole tensor], "optimizers": [named state]}, in the order of `setup`.

        A strategy may add keys; other strategies ignore them. Collective. On ranks other than 0 the tensors may have no
        data (on "meta").
        """

    def local_state(self) -> dict[str, Any] | None:
        """The result of `state_dict` if this process holds the whole state; None if it holds only a part.

        Tensors are not copied. Does not communicate.
        """
        return None

    def held_state(self) -> dict[str, Any] | None:
        """`state_dict` with only this process's part of each tensor, for a checkpoint in slices. Collective.

        A tensor of which each process has a part is a DTensor or a HeldTensor (comm/slices.py). Of other tensors, rank
        0's values count. All processes return the same names. None, on all processes: no tensor is in parts.
        """
        return None

    def reads_stored(self) -> bool:
        """Whether `load_state_dict` accepts StoredTensors (comm/slices.py), of which it reads what this process has."""
        return False

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of any strategy, the same on every process. Collective."""

    def write_weights(self, number: int, write: Callable[[], None]) -> None:
        """Let `write` overwrite model `number`'s parameters and buffers in place. Collective.

        number: in the order of `setup`. write: writes the same whole tensors on all processes; of a sharded tensor,
        each process writes its part.
        """
        write()

    def close(self) -> None:
        """Release threads, hooks and buffers."""
        return None


class LoopStrategy(Strategy):
    """A strategy that receives losses. The user's loop computes them, or the step runs the user's closure."""

    @abstractmethod
    def backward(self, work: Backward) -> None:
        """Add the gradients of weight x loss.

        If `work.final`, also sum them over all shards. If the store has `reduces_each`, do so at every call.
        """


class ClosureStrategy(Strategy):
    """A strategy that runs the user's closure itself. Its loaders yield all shards at once (a Bundle).

    The loop form is refused.
    """

    @abstractmethod
    def forward_backward(self, work: Work) -> list[list[Term]]:
        """Run the closure and its backward on every piece. Returns the detached terms of each piece."""


torch_backward = torch.autograd.backward
"""torch's own function. While a run is open, step/guards.py replaces torch.autograd.backward to watch direct calls."""

_gradients: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def as_gradient(weight: Weight, loss: Tensor) -> Tensor:
    """The weight as the starting gradient of `backward`: a tensor of the loss's shape, dtype and device."""
    if isinstance(weight, Tensor):
        return weight.to(device=loss.device, dtype=loss.dtype).reshape(loss.shape)
    if loss.dim():
        return torch.full_like(loss, weight, requires_grad=False)
    key = (weight, loss.dtype, loss.device)
    gradient = _gradients.get(key)
    if gradient is None:  # cached: a run has few weights, and making such a tensor costs a tenth of a small backward
        if len(_gradients) >= 64:
            _gradients.clear()
        gradient = _gradients[key] = torch.full((), weight, dtype=loss.dtype, device=loss.device)
    return gradient


def backward_here(work: Backward) -> None:
    """Run torch's backward in this process. It adds the gradients to `.grad`."""
    torch_backward(work.losses, work.gradients, inputs=work.inputs, retain_graph=work.retain_graph)
