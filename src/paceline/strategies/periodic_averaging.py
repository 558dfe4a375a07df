"""Replicas that train apart: what each has done since they were last one model, and how they become one again.

Used by local_sgd and diloco. Between two averagings nothing travels. What is averaged then:

  parameters    those that an optimizer holds and that were trained since; in parts, each with a weight of its own
  buffers       floating-point ones that a checkpoint would hold, such as batch norm's running statistics; what has not
                changed keeps its bits, since the change is what is averaged. Of whole numbers (batches counted) the
                greatest is taken
  state         of the optimizers, where it is asked for and for a checkpoint: tensors are averaged, with zeros for a
                replica that has none; of numbers (steps counted) the greatest is taken

Each replica's part in the mean is what it has seen since: the examples, or tokens, that its gradients were means over.
An empty shard, or a gradient that is not finite, makes no update and adds nothing to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.comm.means import greatest_, weighted_mean
from paceline.errors import ModelError
from paceline.strategies.base import Weight
from paceline.strategies.replicated import parameter_names

Optimizer = torch.optim.Optimizer


@dataclass(slots=True)
class Part:
    """Parameters that are averaged together. changed: those that were trained since they were last one, alike on all
    replicas (as an ordered set). weight: what this replica has seen since."""

    parameters: list[Tensor]
    changed: dict[Tensor, None] = field(default_factory=dict)
    weight: Weight = 0.0


class Item(NamedTuple):
    """A tensor to average. base: the same on all replicas, from which the tensor has moved; its move is averaged."""

    tensor: Tensor
    weight: Weight
    base: Tensor | None = None

    @property
    def sent(self) -> Tensor:
        if self.base is None:
            return self.tensor
        still = self.tensor == self.base  # also where both are infinite
        return (self.tensor.to(_wide(self.tensor)) - self.base).masked_fill_(still, 0.0)

    def take(self, mean: Tensor) -> None:
        self.tensor.copy_(mean if self.base is None else self.base + mean)


class PeriodicAveraging:
    """One replica of several. parts: into how many each optimizer's parameters are cut, about equally large, in order.
    steps: the updates that each optimizer has made, or sat out, under this strategy; alike on all replicas."""

    def __init__(self, device: torch.device, parts: int = 1) -> None:
        self.device, self._count = device, parts
        self.models: list[nn.Module] = []
        self.steps: dict[Optimizer, int] = {}
        self.parts: dict[Optimizer, list[Part]] = {}
        self._sent: set[Tensor] = set()  # parameters and buffers that were made alike
        self._alike = False  # whether all replicas are known to have begun with the same weights
        self._buffers: dict[tuple[int, str], Tensor] = {}  # as they were when they were last one
        self._buffer_weight: Weight | None = None  # None: no step since
        self._state_weight: dict[Optimizer, Weight] = {}  # no entry: no step since

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.synchronize()  # in mid-training: what is added comes to replicas that are one
        known, self._sent = self._sent, set()
        self.models = list(models)
        for model in self.models:
            model.to(self.device)
            everything = [*model.parameters(), *model.buffers()]
            collectives.broadcast_tensors([t for t in everything if t not in known])
            self._sent.update(everything)
        for optimizer in optimizers:
            self.steps.setdefault(optimizer, 0)
        self._alike = False
        self._note_buffers()

    # --- a step

    def update(self, optimizer: Optimizer, seen: Weight, *, together: bool = False) -> list[Part]:
        """One update of this replica. together: by a gradient that is all replicas'. Returns the optimizer's parts."""
        self._check_alike()
        parts = self.follow(optimizer)
        if not together and not isinstance(seen, Tensor) and seen == 0:
            for part in parts:  # an optimizer leaves a parameter without gradient alone
                for p in part.parameters:
                    p.grad = None
        optimizer.step()
        self.steps[optimizer] += 1
        self._buffer_weight = seen if self._buffer_weight is None else self._buffer_weight + seen
        if together:
            return parts
        self._state_weight[optimizer] = self._state_weight.get(optimizer, 0.0) + seen
        for part in parts:
            part.changed.update(dict.fromkeys(p for p in part.parameters if p.requires_grad))
            part.weight = part.weight + seen
        return parts

    def follow(self, optimizer: Optimizer) -> list[Part]:
        """The optimizer's parts; parameters that a group was added with belong to the last one."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        parts = self.parts.get(optimizer)
        if parts is None:
            parts = self.parts[optimizer] = [Part(parameters) for parameters in split(own, self._count)]
        elif len(own) != sum(len(part.parameters) for part in parts):
            known = {p for part in parts for p in part.parameters}
            parts[-1].parameters += [p for p in own if p not in known]
        return parts

    def _check_alike(self) -> None:
        """Raises ModelError, on all ranks, where weights were changed on some ranks only since `prepare`."""
        if self._alike:
            return
        named = [(name, p.detach()) for p, name in parameter_names(self.models).items()]
        if differing := collectives.digest_mismatch(named):
            raise ModelError(
                f"the weights differ between ranks before the first step: {', '.join(differing[:5])}"
                f"{' and more' if len(differing) > 5 else ''}. `prepare` made them alike, so they were changed after "
                "it on some ranks only: load weights on every rank, or before `prepare`."
            )
        self._alike = True

    @torch.no_grad()
    def average_gradients(self, optimizers: Iterable[Optimizer], seen: Weight) -> None:
        """Gradients become the mean over all replicas; one that no replica has stays None."""
        trained = [p for o in optimizers for part in self.follow(o) for p in part.parameters if p.requires_grad]
        if any(p.grad is not None and p.grad.is_sparse for p in trained):
            raise ModelError(
                "strategy local_sgd: warmup averages gradients, which it cannot where they are sparse. Make them dense "
                "(nn.Embedding(sparse=False)), or set warmup=0."
            )
        if not trained:
            return
        flags = torch.tensor([float(p.grad is not None) for p in trained]).to(self.device, non_blocking=True)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        *means, flags = weighted_mean([*grads, flags], [seen] * (len(grads) + 1))
        missing = any(p.grad is None for p in trained)
        present = (flags > 0).tolist() if missing else [True] * len(trained)  # to read them waits for the device
        for p, grad, mean, some in zip(trained, grads, means, present, strict=True):
            if some:
                p.grad = grad.copy_(mean)

    # --- becoming one

    def synchronize(self) -> None:
        """The models of all replicas become one: at the mean of their parameters and buffers."""
        self.average([part for parts in self.parts.values() for part in parts], buffers=True)

    def differ(self) -> bool:
        """Have replicas trained since they were last one? Alike on all of them."""
        trained = any(part.changed for parts in self.parts.values() for part in parts)
        return collectives.size_of() > 1 and (trained or self._buffer_weight is not None)

    def average(
        self,
        parts: Sequence[Part],
        take: Callable[[Item, Tensor], None] | None = None,
        bases: Mapping[Tensor, Tensor] | None = None,
        *,
        buffers: bool = False,
        states: Iterable[Optimizer] = (),
    ) -> None:
        """Averages what has changed of these parts, with it buffers and these optimizers' state, by one all-reduce.

        A parameter is overwritten by its mean, or handed with it to `take`. bases: for each parameter what it has moved
        from; the mean is then that of its moves.
        """
        with torch.inference_mode(False), torch.no_grad():
            items = [Item(p, part.weight, None if bases is None else bases[p]) for part in parts for p in part.changed]
            more, counted, numbers = self._changed_buffers() if buffers else ([], [], [])
            for optimizer in states:
                if optimizer in self._state_weight:
                    found = self._changed_state(optimizer, self._state_weight.pop(optimizer))
                    more, counted, numbers = more + found[0], counted + found[1], numbers + found[2]
            means = weighted_mean([item.sent for item in items + more], [item.weight for item in items + more])
            for number, (item, mean) in enumerate(zip(items + more, means, strict=True)):
                if take is not None and number < len(items):
                    take(item, mean)
                else:
                    item.take(mean)
            greatest_(counted)
            for state, key, count in numbers:
                state[key] = type(state[key])(count.item())
            for part in parts:
                part.changed, part.weight = {}, 0.0
            if buffers:
                self._note_buffers()

    def forget(self) -> None:
        """A whole state was loaded: the replicas are one."""
        for part in (part for parts in self.parts.values() for part in parts):
            part.changed, part.weight = {}, 0.0
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
            kept = model.state_dict(keep_vars=True)
            found |= {(number, name): b for name, b in model.named_buffers() if name in kept}
        return found

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
        parameters = [p for part in self.follow(optimizer) for p in part.parameters]
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
        for other in collectives.gather_objects(own):
            union = {**other, **union}
        return dict(sorted(union.items(), key=lambda entry: entry[0]))


class _Form(NamedTuple):
    """What a value of an optimizer's state is. shape: None for a number. host: whether it lies on the CPU."""

    shape: tuple[int, ...] | None
    dtype: str
    host: bool

    @staticmethod
    def of(value: Any) -> _Form:
        if not isinstance(value, Tensor):
            return _Form(None, type(value).__name__, True)
        return _Form(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type == "cpu")

    def zero(self, like: Tensor) -> Any:
        """What a replica has that has made no update of this parameter. like: the parameter."""
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


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
