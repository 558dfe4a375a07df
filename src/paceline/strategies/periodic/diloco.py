"""diloco: independent replicas train for many steps; an outer optimizer updates the shared weights by their mean
change.

Phase 1, inner steps: as local_sgd. Each replica updates its own weights by its own shards; nothing travels.
Phase 2, every `every` steps of an optimizer, the outer step. The outer gradient is (shared weights - local weights),
  averaged over the replicas in one all-reduce, weighted by their examples (or tokens) since the last. With it
  torch.optim.SGD(outer_lr, outer_momentum, nesterov=True) updates the shared weights, the same on all replicas, and
  they become the local ones. Buffers become their mean.
With `fragments=P` the parameters are cut into P runs, about equally large, and the p-th (from 1) has its outer step at
  step p / P of each round: a P-th of the bytes at a time. Buffers go with the last.
With `delay=N` phase 2 falls into two. At its step the all-reduce begins, in a process group of its own, and the inner
  steps go on. N steps later, never earlier, the outer optimizer updates the shared weights by the mean, and the local
  weights w become mix w + (1 - mix) shared; so do floating-point buffers, with the mean that they had when it began. A
  replica's samples count for the next mean by the part of them that stays in its weights: their number times mix.
Before an evaluation in mid-round the local weights become their mean, without an outer step: the round goes on from
  there, and its outer gradient is that of the whole round. Before a checkpoint the inner optimizers' state does too.
  An exchange that is on its way then stays so. A checkpoint waits for its mean, and holds it with the step at which it
  is due.

Between replicas: parameters and buffers, 2 (n - 1) / n of their bytes sent by each of n replicas, every `every` steps.
Memory per replica: parameters, gradients and optimizer state once each; the shared weights and the outer momentum in
float32 or wider; while averaging, what is sent twice more (with `delay` for as long as it is on its way, once).

This changes the mathematics on purpose.

Follows Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
algorithm 1, in which the inner optimizers' state stays on its replica; and for fragments and delay Douillard et al.
2025, "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), algorithm 2, whose tau is `delay` and whose
alpha is `mix`, without its 4-bit outer gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.means import PendingMeans
from paceline.comm.mesh import ALONE, Group
from paceline.errors import SettingError
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.strategies.periodic.periodic_averaging import Fragment, Item, PeriodicAveraging, check_whole
from paceline.world import World

MIX = 0.5
"""The default. The paper calls it alpha."""


def check(
    size: int | None,
    *,
    every: int,
    outer_lr: float,
    outer_momentum: float,
    fragments: int,
    delay: int,
    mix: float,
    average_state: bool,
) -> None:
    """Raises SettingError for what cannot work, on any number of processes."""
    check_whole("diloco", "every", every, 1)
    check_whole("diloco", "fragments", fragments, 1)
    if fragments > every:
        raise SettingError(
            f"strategy diloco: fragments={fragments} with every={every}: each fragment is sent at a step of its own in "
            "a round. Set fragments to every at most."
        )
    if not 0 < outer_lr < math.inf:
        raise SettingError(f"strategy diloco: outer_lr={outer_lr!r}: a learning rate above 0 is needed, such as 0.7.")
    if not 0 <= outer_momentum < 1:
        raise SettingError(f"strategy diloco: outer_momentum={outer_momentum!r}: from 0 to below 1 is needed.")
    check_whole("diloco", "delay", delay, 0)
    if delay >= every:
        raise SettingError(
            f"strategy diloco: delay={delay} with every={every}: the exchange of a fragment ends before its next one "
            "begins. Set delay below every."
        )
    if not 0 <= mix < 1:
        raise SettingError(f"strategy diloco: mix={mix!r}: from 0 to below 1 is needed.")
    if mix != MIX and not delay:
        raise SettingError(
            f"strategy diloco: mix={mix!r} without delay: the local weights have made no steps that could be mixed in. "
            "Set delay, or leave mix out."
        )
    if average_state and delay:
        raise SettingError(
            f"strategy diloco: average_state=true with delay={delay}: the state of the inner optimizers is averaged at "
            "once, which waits for the network. Leave one of them out."
        )


@dataclass(slots=True, eq=False)
class Exchange:
    """A fragment's outer gradient on its way."""

    optimizer: torch.optim.Optimizer  # by whose steps `due` counts
    due: int  # the step at which the mean is used
    parameters: list[Tensor]
    buffers: dict[str, Tensor | None]  # name -> what the buffer's change is counted from; None: the mean is its value
    # Of the changes of the parameters since the last outer step, and of the buffers.
    means: PendingMeans | list[Tensor]

    def wait(self) -> list[Tensor]:
        if isinstance(self.means, PendingMeans):
            self.means = self.means.wait()
        return self.means

    def wait_for_buffers(self) -> dict[str, Tensor]:
        """Name -> mean value."""
        found = zip(self.buffers.items(), self.wait()[len(self.parameters) :], strict=True)
        return {name: mean if base is None else base + mean for (name, base), mean in found}


class DiLoCo(PeriodicAveraging):
    """every: inner steps from one outer step to the next. outer_lr, outer_momentum: of the outer SGD. fragments: into
    how many the parameters are cut, which have their outer steps one after the other. delay: inner steps that are made
    while an outer gradient travels. mix: with a delay, the part of the local weights that stays when they meet the
    shared ones. average_state: average the inner optimizers' state too, with the last fragment."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mix: float = MIX,
        average_state: bool = False,
    ) -> None:
        check(
            world.size,
            every=every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            delay=delay,
            mix=mix,
            average_state=average_state,
        )
        super().__init__(world, device, fragments=fragments)
        self.delay, self.mix = delay, mix if delay else 0.0
        self.every, self.average_state = every, average_state
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self._shared: dict[Tensor, Tensor] = {}  # parameter -> the shared weights, since its first training step
        self._outer: torch.optim.SGD | None = None  # over the shared weights
        self._exchanges: list[Exchange] = []  # on their way; the same on all replicas
        self._background: Group = ALONE  # in which they travel

    def announcement(self) -> str:
        return (
            "strategy diloco changes the mathematics on purpose: every process trains its own weights on its own "
            f"shards, batch norm included, and every {self.every} steps an outer optimizer moves the shared ones "
            "by the mean of what they have learned."
        )

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().setup(models, optimizers)
        if self.delay:
            self._background = self.mesh.background()

    def steps_to_meeting(self) -> int:
        # Nobody gets beyond the step at which the mean is due before all have begun its exchange.
        return self.every - self.steps[self.optimizers[0]] % self.every + self.delay

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        fragments = self.fragments_of(optimizer)
        new = [p for part in fragments for p in part.parameters if p.requires_grad and p not in self._shared]
        self._share({p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in new})
        self.update(optimizer)
        due = [one for one in self._exchanges if one.optimizer is optimizer and one.due <= self.steps[optimizer]]
        for exchange in sorted(due, key=lambda one: one.due):
            self._exchanges.remove(exchange)
            self._end(exchange)
        for number, fragment in enumerate(fragments, start=1):
            if (self.steps[optimizer] - self.every * number // self.fragments) % self.every == 0:
                last = number == self.fragments
                if self.delay:
                    self._begin(optimizer, fragment, buffers=last)
                    continue
                self._outer_step(fragment, [optimizer] if last and self.average_state else [], buffers=last)

    def _share(self, shared: dict[Tensor, Tensor]) -> None:
        """Adds shared weights to those that the outer optimizer updates."""
        if shared:
            self._shared |= shared
            if self._outer is None:
                self._outer = self._make_outer(list(shared.values()))
            else:
                self._outer.add_param_group({"params": list(shared.values())})

    def _make_outer(self, shared: list[Tensor]) -> torch.optim.SGD:
        momentum = self.outer_momentum
        return torch.optim.SGD(shared, lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)

    def _outer_step(self, fragment: Fragment, states: Sequence[torch.optim.Optimizer], *, buffers: bool) -> None:
        """One outer step of the parameters of a fragment that were trained."""
        trained = list(fragment.changed)
        bases = self._bases(trained)

        def set_outer_gradient(item: Item, mean: Tensor) -> None:
            self._shared[item.tensor].grad = -mean

        self.average([fragment], set_outer_gradient, bases, buffers=buffers, states=states)
        if not trained or self._outer is None:
            return
        self._outer.step()
        with torch.no_grad():
            for p in trained:
                p.copy_(self._shared[p])
                self._shared[p].grad = None

    def _bases(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The shared weights as the replicas had them: rounded to the parameter's dtype."""
        return {p: self._shared[p].to(p.dtype).to(self._shared[p].dtype) for p in parameters}

    def _begin(self, optimizer: torch.optim.Optimizer, fragment: Fragment, *, buffers: bool) -> None:
        """Sends the outer gradient of the parameters of a fragment that were trained, and waits for nothing."""
        with torch.inference_mode(False), torch.no_grad():
            trained = list(fragment.changed)
            bases = self._bases(trained)
            items = [Item(p, fragment.weight, bases[p]) for p in trained]
            sent = self.changed_buffers() if buffers else {}
            items += sent.values()
            means = PendingMeans([item.sent for item in items], [item.weight for item in items], self._background)
            due = self.steps[optimizer] + self.delay
            bases_of_buffers = {name: item.base for name, item in sent.items()}
            self._exchanges.append(Exchange(optimizer, due, trained, bases_of_buffers, means))

    def _end(self, exchange: Exchange) -> None:
        """Waits for the mean; the outer step; local weights, and buffers, are mixed with what all have."""
        with torch.inference_mode(False), torch.no_grad():
            for p, mean in zip(exchange.parameters, exchange.wait(), strict=False):
                self._shared[p].grad = -mean
            if exchange.parameters and self._outer is not None:
                self._outer.step()
            for p in exchange.parameters:
                self._shared[p].grad = None
                p.copy_(self._mixed(p, self._shared[p]))
            own = self.named_buffers()
            for name, mean in exchange.wait_for_buffers().items():
                if name in own:
                    own[name].copy_(self._mixed(own[name], mean))
        ended = set(exchange.parameters)
        for fragment in self.fragments_of(exchange.optimizer):
            if not ended.isdisjoint(fragment.parameters):
                fragment.weight = fragment.weight * self.mix
                if not self.mix:  # the replicas are one
                    fragment.changed = {p: None for p in fragment.changed if p not in ended}
        if exchange.buffers:
            self.scale_buffer_weight(self.mix)

    def _mixed(self, local: Tensor, common: Tensor) -> Tensor:
        """mix local + (1 - mix) common; exactly common where they are equal, also where both are infinite."""
        if not self.mix:
            return common
        wide = local.to(common.dtype)
        return torch.where(wide == common, common, torch.lerp(wide, common, 1 - self.mix))

    def state_dict(self) -> dict[str, Any]:
        """In "apart" further {"shared": weights by name, "momentum": outer momentum by name, "exchanges": those on
        their way, each {"optimizer": its number, "due": step, "means": by name, "buffers": by name}}."""
        whole = super().state_dict()
        names = parameter_names(self.models)
        state = self._outer.state if self._outer is not None else {}
        momentum = {p: state.get(shared, {}).get("momentum_buffer") for p, shared in self._shared.items()}
        whole["apart"]["shared"] = {names[p]: shared for p, shared in self._shared.items()}
        whole["apart"]["momentum"] = {names[p]: buffer for p, buffer in momentum.items() if buffer is not None}
        if self._exchanges:
            whole["apart"]["exchanges"] = [self._exchange_state(one, names) for one in self._exchanges]
        return whole

    def _exchange_state(self, exchange: Exchange, names: Mapping[Tensor, str]) -> dict[str, Any]:
        return {
            "optimizer": self.optimizers.index(exchange.optimizer),
            "due": exchange.due,
            "means": {names[p]: mean for p, mean in zip(exchange.parameters, exchange.wait(), strict=False)},
            "buffers": exchange.wait_for_buffers(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        apart = state.get("apart", {})
        by_name = {name: p for p, name in parameter_names(self.models).items()}
        known = {by_name[name]: shared for name, shared in apart.get("shared", {}).items() if name in by_name}
        self._shared = {p: shared.to(p.device, copy=True) for p, shared in known.items()}
        self._outer = self._make_outer(list(self._shared.values())) if self._shared else None
        for name, buffer in apart.get("momentum", {}).items():
            if self._outer is not None and by_name.get(name) in self._shared:
                shared = self._shared[by_name[name]]
                self._outer.state[shared]["momentum_buffer"] = buffer.to(shared.device, copy=True)
        self._exchanges = [
            self._loaded_exchange(saved, by_name)
            for saved in apart.get("exchanges", [])
            if saved["optimizer"] < len(self.optimizers)
        ]

    def _loaded_exchange(self, saved: Mapping[str, Any], by_name: Mapping[str, Tensor]) -> Exchange:
        """An exchange whose mean is known. It is due at the step that was saved, with any options of this run."""
        parameters = {by_name[name]: mean for name, mean in saved["means"].items() if by_name.get(name) in self._shared}
        means = [mean.to(p.device, copy=True) for p, mean in parameters.items()]
        own = self.named_buffers()
        buffers = {name: mean for name, mean in saved["buffers"].items() if name in own}
        means += [mean.to(own[name].device, copy=True) for name, mean in buffers.items()]
        optimizer = self.optimizers[saved["optimizer"]]
        return Exchange(optimizer, int(saved["due"]), list(parameters), dict.fromkeys(buffers), means)
