"""What every strategy is: where model state lives, and how gradients are combined. Nothing else.

Phases of one global batch, as `Run` drives them:

  1. for each micro-batch, `forward_backward` (a closure) or `backward` (the loop); the last one completes the
     reduction, so that `.grad` of the user's own parameters holds the sum over all shards;
  2. `finish`, once before an update: whatever must be complete for it;
  3. `step`, the update itself.

Weights. Losses reach a strategy with the weight that makes their plain sum over all shards and micro-batches the mean
over the global batch. A strategy whose engine averages instead of adding undoes that by scaling the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.canonical import CanonicalSums
from paceline.world import World

Weight = float | Tensor
"""How much of the global batch a loss stands for: a number, or a 0-dim tensor on the loss's device."""


class Dealer(ABC):
    """Hands out parts of global batches to processes that are not in step: an update is of one part."""

    @abstractmethod
    def begin(self, loader: str, epoch: int, first: int, steps: int) -> None:
        """A pass over the steps from `first` to `steps` - 1 begins; all processes call it, alike."""

    @abstractmethod
    def take(self, loader: str, epoch: int, wait: bool) -> tuple[int, int] | None:
        """The next (step, shard) for this process. None: there is none now; with `wait`, all have been computed."""

    @abstractmethod
    def enter(self, loader: str, epoch: int, part: tuple[int, int]) -> None:
        """The computation of a part begins."""

    @abstractmethod
    def done(self, loader: str, epoch: int, part: tuple[int, int], empty: bool = False) -> None:
        """It has ended. empty: there was nothing to compute."""

    @abstractmethod
    def leave(self, loader: str, epoch: int) -> None:
        """The pass is left before its end; the parts that this process still has are for others."""

    @abstractmethod
    def forward(self, optimizer: torch.optim.Optimizer) -> int:
        """By how many steps, as large as a global batch, all processes together have come forward since it was asked
        last."""


@dataclass
class Layout:
    """How a global batch is laid over the run.

    shards: how many shards a global batch is cut into. mine: those that this process computes. together: whether a
    yield of the loader holds all micro-batches of a shard at once (a pipeline) or one (everything else). turns: in how
    many turns a process yields its shards, one after the other; a process with fewer shards yields zero-length batches
    in their place, so that all yield equally often. 0: a yield holds a micro-batch of each of them. bundled: whether
    it does so also on a process that has one, so that a script is the same on all. local:
    whether replicas train apart: a gradient is then the mean over the process's own shard, batch norm sees that shard
    alone, a gradient that is not finite stops or skips one replica, and nothing is asked of the others for any of it.
    dealt, dealer: into how many parts a global batch is cut, and who hands them out, where it is not known beforehand
    who computes which; a part is then a global batch of its own (shards, mine: 1, (0,); local).

    A strategy may change shards and mine when replicas are lost or come, and then adds 1 to `version`: loaders begin
    the global batch at hand once more, in the new cut.
    """

    shards: int
    mine: tuple[int, ...]
    together: bool = False
    turns: int = 0
    bundled: bool = False
    local: bool = False
    dealt: int = 0
    dealer: Dealer | None = None
    version: int = 0

    @property
    def opaque(self) -> bool:
        """Whether a yield holds several collated batches, so that only a closure can compute it."""
        return self.together or self.bundled or (len(self.mine) != 1 and not self.turns)


@dataclass(slots=True)
class Piece:
    """One micro-batch of one shard."""

    shard: int
    micro: int
    count: int
    batch: Any


@dataclass(slots=True)
class Term:
    """One addend of a loss. value: a scalar. count: None for a mean over the piece's examples; else value is a sum
    over `count` things, whose total over the global batch it is to be divided by."""

    value: Tensor
    count: Weight | None


Weights = list[list[Weight | None]]
"""For each piece, a weight for each of its terms; None leaves the term out of this pass."""


class Work(NamedTuple):
    """A micro-batch to compute with a closure.

    compute(model, piece, device) runs the user's closure there and returns its terms. passes(terms of each piece)
    yields, for each backward pass that is needed, its weights and whether the graph must be kept for the next one. It
    is called once, between the forwards and the backwards, may communicate, and must be exhausted. final: the last
    micro-batch of the global batch, whose backward completes the reduction. call: the number of the backward call in
    this micro-batch.
    inputs: the only parameters to touch, or None. total: examples in the whole global batch.
    """

    model: Any
    pieces: Sequence[Piece]
    compute: Callable[[Any, Piece, torch.device], list[Term]]
    passes: Callable[[list[list[Term]]], Iterator[tuple[Weights, bool]]]
    final: bool
    call: int
    inputs: Sequence[Tensor] | None
    total: int


Kind = tuple[int, int | None]
"""The number of a backward call in its micro-batch, and the identity of the first parameter that it is to touch (None:
it may touch all, or none can be)."""


def kind_of(call: int, inputs: Sequence[Tensor] | None) -> Kind:
    """Backward calls of one kind are to reach the same parameters in every step: those of one number, for one
    optimizer. A penalty that a GAN's loop adds in every fourth step moves the numbers of the calls after it."""
    return call, id(inputs[0]) if inputs else None


class BackwardPass(NamedTuple):
    """What `backward` is to do: for each root, a scalar, its gradients times a weight. final, call, inputs: see Work.
    retain_graph: whether another pass over the same graphs follows."""

    roots: Sequence[Tensor]
    weights: Sequence[Weight]
    final: bool
    call: int
    inputs: Sequence[Tensor] | None = None
    retain_graph: bool = False

    @property
    def pairs(self) -> Iterator[tuple[Tensor, Weight]]:
        return zip(self.roots, self.weights, strict=True)

    @property
    def kind(self) -> Kind:
        return kind_of(self.call, self.inputs)


class Strategy(ABC):
    """At most eight methods. What is not a method is a plain attribute that its constructor sets."""

    layout: Layout
    device: torch.device  # on which the user's own models are
    closure_only: bool = False
    views: bool = False  # whether `.grad` may share memory that the next backward writes to
    loss_scale: float = 1.0  # fp16: a factor of all weights of this global batch, taken out after the reduction
    seen: Weight = 0.0  # with layout.local: how many examples (or tokens) `.grad` is a mean over; set before `finish`
    settle: Callable[[], None] | None = None  # with layout.local: makes the replicas' models one. Collective
    apart: Callable[[], bool] | None = None  # with layout.local: whether the replicas' models differ; asks nobody
    reduces_each: bool = False  # whether every micro-batch's gradients are summed over the shards, not the last's alone
    # For each further replica of this process, the user's parameter -> its own: what is done to the gradient of the one
    # (put aside, scaled, clipped, cleared) is done to that of the other. The same object always.
    copies: Sequence[Mapping[Tensor, Tensor]] = ()
    # The user's parameter -> the tensor whose `.grad` is this process's part of its gradient, where it has none itself.
    held: Mapping[Tensor, Tensor] = MappingProxyType({})
    parts: dist.ProcessGroup | None = None  # processes with gradients of other parameters: a norm is over all of them
    # What adds gradients up in one order, whichever process computes which shard; `backward` then does not.
    sums: CanonicalSums | None = None
    group: dist.ProcessGroup | None = None  # processes that have each shard once (None: all; others see the same data)

    @abstractmethod
    def __init__(self, world: World, device: torch.device) -> None:
        """Options are further keyword arguments. Raises SettingError for a world that it cannot work in."""

    @abstractmethod
    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Takes charge of these models and optimizers, alike on every replica. Called again when some are added."""

    def forward_backward(self, work: Work) -> list[list[Term]]:
        """Runs the closure on every piece, and its backward. Returns the terms, detached, of each piece. This one is
        for a process that computes one shard at a time: the closure, then `backward`."""
        (piece,) = work.pieces
        terms = work.compute(work.model, piece, self.device)
        for (weights,), retain_graph in work.passes([terms]):
            pairs = [(term.value, weight) for term, weight in zip(terms, weights, strict=True) if weight is not None]
            roots, shares = [value for value, _ in pairs], [weight for _, weight in pairs]
            self.backward(BackwardPass(roots, shares, work.final, work.call, work.inputs, retain_graph))
        return [[Term(term.value.detach(), term.count) for term in terms]]

    def backward(self, work: BackwardPass) -> None:
        """Adds the gradients of weight x root to `.grad`, summed over all shards when `final` (or always, with
        `reduces_each`). This one adds those of this process. Not called with `closure_only`."""
        run_here(work)

    def finish(self) -> None:
        """The global batch is complete: called before its updates. Gradients are final when it returns."""
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update."""
        optimizer.step()

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


_backward = torch.autograd.backward  # as it is before a run watches direct calls of it (train/guards.py)
_gradients: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def as_gradient(weight: Weight, root: Tensor) -> Tensor:
    """The weight as the gradient that `backward` starts from: a tensor of the root's shape, dtype and device."""
    if isinstance(weight, Tensor):
        return weight.to(device=root.device, dtype=root.dtype).reshape(root.shape)
    if root.dim():
        return torch.full_like(root, weight, requires_grad=False)
    key = (weight, root.dtype, root.device)
    gradient = _gradients.get(key)
    if gradient is None:  # the weights of a run are few: making such a tensor costs a tenth of a small backward
        if len(_gradients) >= 64:
            _gradients.clear()
        gradient = _gradients[key] = torch.full((), weight, dtype=root.dtype, device=root.device)
    return gradient


def run_here(work: BackwardPass, factor: float = 1) -> None:
    """torch's backward, in this process: adds the gradients, times a factor, to `.grad`."""
    gradients = [as_gradient(weight * factor, root) for root, weight in work.pairs]
    _backward(work.roots, gradients, inputs=work.inputs, retain_graph=work.retain_graph)
