"""Independent replicas: each trains its own weights, and now and then their models are averaged into one.

The base of local_sgd and diloco, which say when. Between two averagings nothing travels. What is averaged then:

  parameters    those that an optimizer holds and that were trained since the last time, in fragments
  buffers       floating-point ones that a checkpoint would hold, such as batch norm's running statistics. Their change
                is averaged, so that a buffer that has not changed keeps its bits. Of whole numbers (batches counted)
                the greatest is used
  state         of the optimizers, where it is asked for and for a checkpoint: tensors are averaged, with zeros for a
                replica that has none; of numbers (steps counted) the greatest is used

A replica's weight in the mean is its number of samples since the last averaging: the examples, or tokens, that its
gradients were means over. An empty shard, or a gradient that is not finite, makes no update and adds no samples.
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

from paceline.comm import collectives
from paceline.comm.means import greatest_, weighted_mean
from paceline.comm.mesh import Mesh
from paceline.comm.scalars import upload
from paceline.data.batch_plan import one_shard
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
    """Raises SettingError where an option is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"strategy {strategy}: {option}={value!r}: a whole number from {least} on is needed.")


@dataclass(slots=True)
class Fragment:
    """Parameters of one optimizer that are averaged together."""

    parameters: list[Tensor]
    changed: dict[Tensor, None] = field(default_factory=dict)  # trained since the last averaging: an ordered set
    weight: Weight = 0.0  # samples of this replica since the last averaging


class Item(NamedTuple):
    """A tensor to average."""

    tensor: Tensor
    weight: Weight  # of this replica
    base: Tensor | None = None  # the same on all replicas; where it is given, the difference from it is averaged

    @property
    def sent(self) -> Tensor:
        if self.base is None:
            return self.tensor
        unchanged = self.tensor == self.base  # also where both are infinite
        wide = torch.promote_types(self.tensor.dtype, torch.float32)
        return (self.tensor.to(wide) - self.base).masked_fill_(unchanged, 0.0)

    def apply(self, mean: Tensor) -> None:
        self.tensor.copy_(mean if self.base is None else self.base + mean)


class PeriodicAveraging(LoopStrategy):
    """One replica of several. fragments: into how many each optimizer's parameters are cut, about equally large, in
    order."""

    def __init__(self, world: World, device: torch.device, *, fragments: int = 1) -> None:
        self.world, self.device, self.fragments = world, device, fragments
        self.mesh = Mesh(device, world.rank, {"replicate": world.size}, independent=True)
        self.plan = one_shard(world.size, world.rank, independent=True)
        self.store = GradientStore()
        self.steps: dict[Optimizer, int] = {}  # updates that each has made, or sat out; the same on all replicas
        self._fragments: dict[Optimizer, list[Fragment]] = {}
        self._sent: set[Tensor] = set()  # parameters and buffers that have had rank 0's values
        self._alike = False  # whether all replicas are known to have begun with the same weights
        self._buffers: dict[tuple[int, str], Tensor] = {}  # their values after the last averaging
        self._buffer_weight: Weight | None = None  # None: no step since
        self._state_weight: dict[Optimizer, Weight] = {}  # no entry: no step since

    @abstractmethod
    def announcement(self) -> str:
        """What rank 0 tells at the first `prepare`: how this strategy changes the mathematics. "": nothing."""

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if not self.models and self.world.rank == 0 and (text := self.announcement()):
            print(f"paceline: {text}", file=sys.stderr)
        self.synchronize()  # in mid-training: what is added comes to replicas that are equal
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
        """One update of this replica. averaged: by the mean of all replicas' gradients. Returns the optimizer's
        fragments."""
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
        """The optimizer's fragments. Parameters of a group that was added later belong to the last one."""
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
        """Raises ModelError, on all ranks, where weights were changed on some ranks only since `prepare`."""
        if not self._alike:
            named = [(name, p) for p, name in parameter_names(self.models).items()]
            check_same_bits(named, "before the first step", CHANGED_AT_START)
            self._alike = True

    @torch.no_grad()
    def average_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Gradients become the mean over all replicas; one that no replica has stays None."""
        trained = [p for o in optimizers for part in self.fragments_of(o) for p in part.parameters if p.requires_grad]
        if any(p.grad is not None and p.grad.is_sparse for p in trained):
            raise ModelError(
                "strategy local_sgd: warmup averages gradients, which it cannot where they are sparse. Make them dense "
                "(nn.Embedding(sparse=False)), or set warmup=0."
            )
        if not trained:
            return
        flags = upload(torch.tensor([float(p.grad is not None) for p in trained]), self.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        *means, flags = weighted_mean([*grads, flags], [self.store.samples] * (len(grads) + 1))
        missing = any(p.grad is None for p in trained)
        present = (flags > 0).tolist() if missing else [True] * len(trained)  # to read them waits for the device
        for p, grad, mean, some in zip(trained, grads, means, present, strict=True):
            if some:
                p.grad = grad.copy_(mean)

    # --- averaging

    def synchronize(self) -> None:
        """The models of all replicas become the mean of their parameters and buffers."""
        self.average(self.all_fragments(), buffers=True)

    def synchronized(self) -> bool:
        trained = any(fragment.changed for fragment in self.all_fragments())
        return collectives.size_of() == 1 or not (trained or self._buffer_weight is not None)

    def average(
        self,
        fragments: Sequence[Fragment],
        apply: Callable[[Item, Tensor], None] = Item.apply,
        bases: Mapping[Tensor, Tensor] | None = None,
        *,
        buffers: bool = False,
        states: Iterable[Optimizer] = (),
    ) -> None:
        """Averages what has changed of these fragments, and with it buffers and these optimizers' state, by one
        all-reduce.

        apply: of a parameter's item and its mean; overwrites the parameter by default. bases: of each parameter, the
        value that its differences are averaged from.
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
        """{"apart": {"steps": of each optimizer}} beside what every strategy has. The replicas go on from the mean."""
        self.average(self.all_fragments(), buffers=True, states=self.optimizers)
        apart = {"steps": [self.steps[optimizer] for optimizer in self.optimizers]}
        return {**replicated_state(self.models, self.optimizers), "apart": apart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        # Where in its round each optimizer is; at the beginning, where the checkpoint is of another strategy.
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
        """Name -> buffer, of those that are averaged. Names of a second model begin with "1/"."""
        found = self._all_buffers().items()
        return {
            f"{number}/{name}" if number else name: b for (number, name), b in found if (number, name) in self._buffers
        }

    def changed_buffers(self) -> dict[str, Item]:
        """Name -> item, of the floating-point buffers; none where no step was made since they were one."""
        if self._buffer_weight is None:
            return {}
        bases = {f"{number}/{name}" if number else name: base for (number, name), base in self._buffers.items()}
        return {name: Item(buffer, self._buffer_weight, bases[name]) for name, buffer in self.named_buffers().items()}

    def scale_buffer_weight(self, part: float) -> None:
        """What counts for the mean of buffers: this part of the samples so far."""
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
        """What some replica has as state, by the parameter's number and the state's key, in one order. Collective."""
        own = {
            (number, key): _Form.of(value)
            for number, p in enumerate(parameters)
            for key, value in sorted(optimizer.state.get(p, {}).items())
            if isinstance(value, (Tensor, int, float))
        }
        digests = collectives.gather_objects(zlib.crc32(repr(own).encode()))
        if len(set(digests)) == 1:
            return own
        union: dict[tuple[int, str], _Form] = {}
        everyone: list[Any] = collectives.gather_objects({place: tuple(form) for place, form in own.items()})
        for other in everyone:
            union = {**{place: _Form(*form) for place, form in other.items()}, **union}
        return dict(sorted(union.items(), key=lambda entry: entry[0]))


class _Form(NamedTuple):
    """What a value of an optimizer's state is."""

    shape: tuple[int, ...] | None  # None for a number
    dtype: str  # of a number its type
    host: bool  # whether it lies on the CPU

    @staticmethod
    def of(value: Any) -> _Form:
        if not isinstance(value, Tensor):
            return _Form(None, type(value).__name__, True)
        return _Form(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type == "cpu")

    def zero(self, like: Tensor) -> Any:
        """The value on a replica that has made no update of the parameter `like`."""
        if self.shape is None:
            return {"bool": False, "int": 0}.get(self.dtype, 0.0)
        dtype = getattr(torch, self.dtype)
        if self.shape == tuple(like.shape):
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)  # in the parameter's memory format
        return torch.zeros(self.shape, dtype=dtype, device="cpu" if self.host else like.device)


def split(parameters: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Parameters in `count` runs, about equally large: each goes to the run in which its middle lies."""
    runs: list[list[Tensor]] = [[] for _ in range(count)]
    total, before = max(sum(p.numel() for p in parameters), 1), 0
    for p in parameters:
        runs[min(int((before + p.numel() / 2) * count / total), count - 1)].append(p)
        before += p.numel()
    return runs
