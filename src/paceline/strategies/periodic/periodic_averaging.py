"""Independent replicas: each trains its weights, and the models are averaged every few steps.

The base class of local_sgd and diloco, which decide when to average. Between two averagings nothing is sent. An
averaging covers:

  parameters    an optimizer's parameters that were trained since the last averaging, in fragments
  buffers       floating-point buffers that a checkpoint would hold, such as batch norm's running statistics. Their
                changes are averaged, so that an unchanged buffer keeps its bits. Integer buffers (batches counted) are
                set to their maximum
  state         the optimizers' state, if requested or for a checkpoint. Tensors are averaged; a replica without the
                tensor adds zeros. Numbers (steps counted) are set to their maximum

A replica's weight in the mean is its number of samples since the last averaging: the examples (or tokens) that its
gradients are means over. A step with an empty shard, or with a gradient that is not finite, makes no update and adds no
samples.
"""

from __future__ import annotations

import sys
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.means import greatest_, weighted_mean
from paceline.comm.mesh import Mesh, world_group
from paceline.comm.scalars import upload
from paceline.data.batch_plan import BatchPlan, one_shard
from paceline.data.shard_sizes import ShardSizes
from paceline.errors import ModelError, SettingError
from paceline.strategies.base import Backward, LoopStrategy, Weight, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import (
    CHANGED_AT_START,
    check_same_bits,
    load_replicated,
    parameter_names,
    replicated_state,
    send_models,
)
from paceline.world import World

Optimizer = torch.optim.Optimizer


def check_whole(strategy: str, option: str, value: object, least: int) -> None:
    """Raises SettingError if an option is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"strategy {strategy}: {option}={value!r}: use a whole number of at least {least}.")


@dataclass(slots=True)
class Fragment:
    """Parameters of one optimizer that are averaged together."""

    parameters: list[Tensor]
    changed: dict[Tensor, None] = field(default_factory=dict)  # trained since the last averaging: an ordered set
    weight: Weight = 0.0  # samples of this replica since the last averaging


class Item(NamedTuple):
    """A tensor to average."""

    tensor: Tensor
    weight: Weight  # this replica's weight in the mean
    base: Tensor | None = None  # if given, the same on all replicas: the difference from it is averaged

    @property
    def sent(self) -> Tensor:
        if self.base is None:
            return self.tensor
        unchanged = self.tensor == self.base  # also true if both are infinite
        wide = torch.promote_types(self.tensor.dtype, torch.float32)
        return (self.tensor.to(wide) - self.base).masked_fill_(unchanged, 0.0)

    def apply(self, mean: Tensor) -> None:
        self.tensor.copy_(mean if self.base is None else self.base + mean)


class PeriodicAveraging(LoopStrategy):
    """Trains one of several replicas. fragments: number of parts of about equal size into which each optimizer's
    parameters are split, in order."""

    def __init__(self, world: World, device: torch.device, *, fragments: int = 1) -> None:
        self.world, self.device, self.fragments = world, device, fragments
        self.mesh = Mesh(device, world.rank, {"replicate": world.size}, independent=True)
        self.plan: BatchPlan = one_shard(world.size, world.rank, independent=True)
        self.store = GradientStore()
        self.steps: dict[Optimizer, int] = {}  # updates of each optimizer, skipped ones included; same on all replicas
        self._fragments: dict[Optimizer, list[Fragment]] = {}
        self._sent: set[Tensor] = set()  # parameters and buffers that have received rank 0's values
        self._alike = False  # whether a check has shown that all replicas began with the same weights
        self._buffers: dict[tuple[int, str], Tensor] = {}  # values of the buffers after the last averaging
        self._buffer_weight: Weight | None = None  # None: no step since the last averaging
        self._state_weight: dict[Optimizer, Weight] = {}  # no entry: no step since the last averaging

    @abstractmethod
    def announcement(self) -> str:
        """Rank 0's message at the first `prepare`, on how the strategy changes the mathematics; "" for no message."""

    def split_by(self, sizes: ShardSizes) -> bool:
        self.plan = self.plan.balanced(sizes)
        return True

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if not self.models and self.world.rank == 0 and (text := self.announcement()):
            print(f"paceline: {text}", file=sys.stderr)
        self.synchronize()  # if training has begun: new models and optimizers need equal replicas
        self.models, self.optimizers = list(models), list(optimizers)
        self._sent = send_models(models, self.device, self._sent)
        for optimizer in optimizers:
            self.steps.setdefault(optimizer, 0)
        self._alike = False
        self._note_buffers()

    def backward(self, work: Backward) -> None:
        backward_here(work)

    # --- a step

    def update(self, optimizer: Optimizer, *, averaged: bool = False) -> list[Fragment]:
        """Make one update of this replica. Returns the optimizer's fragments. averaged: whether the gradients were
        averaged over all replicas."""
        self._check_alike()
        fragments, samples = self.fragments_of(optimizer), self.store.samples
        if not averaged and not isinstance(samples, Tensor) and samples == 0:
            for fragment in fragments:  # an optimizer does not change a parameter without a gradient
                for p in fragment.parameters:
                    p.grad = None
        optimizer.step()
        self.steps[optimizer] += 1
        self._buffer_weight = samples if self._buffer_weight is None else self._buffer_weight + samples
        if averaged:
            return fragments
        self._state_weight[optimizer] = self._state_weight.get(optimizer, 0.0) + samples
        for fragment in fragments:
            fragment.changed.update(dict.fromkeys(p for p in fragment.parameters if p.requires_grad))
            fragment.weight = fragment.weight + samples
        return fragments

    def fragments_of(self, optimizer: Optimizer) -> list[Fragment]:
        """The optimizer's fragments. Parameters of a group that was added later belong to the last fragment."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        fragments = self._fragments.get(optimizer)
        if fragments is None:
            fragments = [Fragment(parameters) for parameters in split(own, self.fragments)]
            self._fragments[optimizer] = fragments
        elif len(own) != sum(len(fragment.parameters) for fragment in fragments):
            known = {p for fragment in fragments for p in fragment.parameters}
            fragments[-1].parameters += [p for p in own if p not in known]
        return fragments

    def all_fragments(self) -> list[Fragment]:
        return [fragment for fragments in self._fragments.values() for fragment in fragments]

    def _check_alike(self) -> None:
        """Raises ModelError, on all ranks, if weights were changed on only some ranks since `prepare`."""
        if not self._alike:
            named = [(name, p) for p, name in parameter_names(self.models).items()]
            check_same_bits(named, "before the first step", CHANGED_AT_START)
            self._alike = True

    @torch.no_grad()
    def average_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Replace each gradient by its mean over all replicas. A gradient that is None on all replicas stays None."""
        trained = [p for o in optimizers for part in self.fragments_of(o) for p in part.parameters if p.requires_grad]
        if any(p.grad is not None and p.grad.is_sparse for p in trained):
            raise ModelError(
                "strategy local_sgd: warmup averages gradients, but sparse gradients cannot be averaged. Make them "
                "dense (nn.Embedding(sparse=False)), or set warmup=0."
            )
        if not trained:
            return
        flags = upload(torch.tensor([float(p.grad is not None) for p in trained]), self.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        *means, flags = weighted_mean([*grads, flags], [self.store.samples] * (len(grads) + 1))
        missing = any(p.grad is None for p in trained)
        present = (flags > 0).tolist() if missing else [True] * len(trained)  # tolist() waits for the device
        for p, grad, mean, some in zip(trained, grads, means, present, strict=True):
            if some:
                p.grad = grad.copy_(mean)

    # --- averaging

    def synchronize(self) -> None:
        """Replace the models of all replicas by the mean of their parameters and buffers."""
        self.average(self.all_fragments(), buffers=True)

    def synchronized(self) -> bool:
        trained = any(fragment.changed for fragment in self.all_fragments())
        return world_group().size == 1 or not (trained or self._buffer_weight is not None)

    def average(
        self,
        fragments: Sequence[Fragment],
        apply: Callable[[Item, Tensor], None] = Item.apply,
        bases: Mapping[Tensor, Tensor] | None = None,
        *,
        buffers: bool = False,
        states: Iterable[Optimizer] = (),
    ) -> None:
        """Average the trained parameters of these fragments in one all-reduce.

        apply: called with each parameter's item and mean; by default it overwrites the parameter. bases: parameter ->
        base; if given, the differences from the bases are averaged. buffers: average the buffers too. states: average
        the state of these optimizers too.
        """
        with torch.inference_mode(False), torch.no_grad():
            items = [
                Item(p, part.weight, None if bases is None else bases[p]) for part in fragments for p in part.changed
            ]
            more, counted, numbers = self._changed_buffers() if buffers else ([], [], [])
            for optimizer in states:
                if optimizer in self._state_weight:
                    found = self._changed_state(optimizer, self._state_weight.pop(optimizer))
                    more, counted, numbers = more + found[0], counted + found[1], numbers + found[2]
            means = weighted_mean([item.sent for item in items + more], [item.weight for item in items + more])
            for number, (item, mean) in enumerate(zip(items + more, means, strict=True)):
                (apply if number < len(items) else Item.apply)(item, mean)
            greatest_(counted)
            for state, key, count in numbers:
                state[key] = type(state[key])(count.item())
            for fragment in fragments:
                fragment.changed, fragment.weight = {}, 0.0
            if buffers:
                self._note_buffers()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Average the replicas, which then continue from the mean. The state has one more key than with other
        strategies: {"apart": {"steps": steps of each optimizer}}."""
        self.average(self.all_fragments(), buffers=True, states=self.optimizers)
        own = {"steps": [self.steps[optimizer] for optimizer in self.optimizers]}
        return {**replicated_state(self.models, self.optimizers), "apart": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        # Each optimizer's position in its round. A checkpoint of another strategy starts a new round.
        steps = [*state.get("apart", {}).get("steps", []), *[0] * len(self.optimizers)]
        self.steps = dict(zip(self.optimizers, map(int, steps), strict=False))
        for fragment in self.all_fragments():
            fragment.changed, fragment.weight = {}, 0.0
        self._state_weight.clear()
        self._alike = False
        self._note_buffers()

    # --- buffers

    def _note_buffers(self) -> None:
        self._buffer_weight = None
        self._buffers = {
            key: b.detach().clone() for key, b in self._all_buffers().items() if b.is_floating_point() or b.is_complex()
        }

    def _all_buffers(self) -> dict[tuple[int, str], Tensor]:
        found: dict[tuple[int, str], Tensor] = {}
        for number, model in enumerate(self.models):
            persistent = model.state_dict(keep_vars=True)
            found |= {(number, name): b for name, b in model.named_buffers() if name in persistent}
        return found

    def named_buffers(self) -> dict[str, Tensor]:
        """Name -> buffer, for the averaged buffers. Names of a second model begin with "1/"."""
        found = self._all_buffers().items()
        return {
            f"{number}/{name}" if number else name: b for (number, name), b in found if (number, name) in self._buffers
        }

    def changed_buffers(self) -> dict[str, Item]:
        """Name -> item, for the floating-point buffers; empty if no step was made since the last averaging."""
        if self._buffer_weight is None:
            return {}
        bases = {f"{number}/{name}" if number else name: base for (number, name), base in self._buffers.items()}
        return {name: Item(buffer, self._buffer_weight, bases[name]) for name, buffer in self.named_buffers().items()}

    def scale_buffer_weight(self, part: float) -> None:
        """Multiply this replica's weight in the next mean of buffers by `part`."""
        if self._buffer_weight is not None:
            self._buffer_weight = self._buffer_weight * part

    def _changed_buffers(self) -> tuple[list[Item], list[Tensor], list[Any]]:
        if self._buffer_weight is None:
            return [], [], []
        items, counted = [], []
        for key, buffer in self._all_buffers().items():
            if key in self._buffers:
                items.append(Item(buffer, self._buffer_weight, self._buffers[key]))
            elif not buffer.is_floating_point() and not buffer.is_complex():
                counted.append(buffer)
        return items, counted, []

    # --- optimizer state

    def _changed_state(self, optimizer: Optimizer, weight: Weight) -> tuple[list[Item], list[Tensor], list[Any]]:
        parameters = [p for part in self.fragments_of(optimizer) for p in part.parameters]
        items, counted, numbers = [], [], []
        for (number, key, *_), form in self._forms(optimizer, parameters).items():
            state = optimizer.state[parameters[number]]
            if key not in state:
                state[key] = form.zero(parameters[number])
            value = state[key]
            if not isinstance(value, Tensor):
                numbers.append((state, key, torch.tensor(float(value), dtype=torch.float64)))
                counted.append(numbers[-1][2])
            elif value.dim() and (value.is_floating_point() or value.is_complex()):
                items.append(Item(value, weight))
            else:
                counted.append(value)
        return items, counted, numbers

    def _forms(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> dict[tuple[int, str], _Form]:
        """(number of the parameter, key) -> form, for the optimizer state of all replicas. The order is the same on all
        replicas. Collective."""
        own = {
            (number, key): _Form.of(value)
            for number, p in enumerate(parameters)
            for key, value in sorted(optimizer.state.get(p, {}).items())
            if isinstance(value, (Tensor, int, float))
        }
        digests = world_group().gather(zlib.crc32(repr(own).encode()))
        if len(set(digests)) == 1:
            return own
        union: dict[tuple[int, str], _Form] = {}
        everyone: list[Any] = world_group().gather({place: tuple(form) for place, form in own.items()})
        for other in everyone:
            union = {**{place: _Form(*form) for place, form in other.items()}, **union}
        return dict(sorted(union.items(), key=lambda entry: entry[0]))


class _Form(NamedTuple):
    """The form of a value in an optimizer's state."""

    shape: tuple[int, ...] | None  # None for a number
    dtype: str  # for a number, the name of its type
    host: bool  # whether the value is on the CPU

    @staticmethod
    def of(value: Any) -> _Form:
        if not isinstance(value, Tensor):
            return _Form(None, type(value).__name__, True)
        return _Form(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type == "cpu")

    def zero(self, like: Tensor) -> Any:
        """Zero in this form, for a replica that has not updated the parameter `like`."""
        if self.shape is None:
            return {"bool": False, "int": 0}.get(self.dtype, 0.0)
        dtype = getattr(torch, self.dtype)
        if self.shape == tuple(like.shape):
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)  # in the parameter's memory format
        return torch.zeros(self.shape, dtype=dtype, device="cpu" if self.host else like.device)


def split(parameters: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Split parameters in order into `count` parts of about equal size. A parameter belongs to the part that contains
    its middle."""
    runs: list[list[Tensor]] = [[] for _ in range(count)]
    total, before = max(sum(p.numel() for p in parameters), 1), 0
    for p in parameters:
        runs[min(int((before + p.numel() / 2) * count / total), count - 1)].append(p)
        before += p.numel()
    return runs
