"""diloco: independent replicas train for many steps, then an outer optimizer applies their mean change to the shared
weights.

Phase 1, inner steps, as in local_sgd: each replica updates its weights from its shards; nothing is sent.
Phase 2, the outer step, after every `every` steps of an optimizer. The outer gradient is (shared weights - local
  weights), averaged over the replicas in one all-reduce. Each replica is weighted by its examples (or tokens) since the
  last outer step. torch.optim.SGD(outer_lr, outer_momentum, nesterov=True) applies the outer gradient to the shared
  weights, with the same result on all replicas. The shared weights are then copied to the local weights, and buffers
  are replaced by their mean.
With `fragments=P` the parameters are split in order into P fragments of about equal size. In each
  round of `every` steps, fragment p (from 1) has its outer step after every * p / P steps, so 1 / P of the bytes is
  sent at a time. Buffers are averaged with the last fragment.
With `delay=N` phase 2 has two parts. First the all-reduce begins, in a separate process group, while the inner steps
  continue. Exactly N steps later the outer optimizer updates the shared weights, and the local weights w become
  mix * w + (1 - mix) * shared. Floating-point buffers are mixed the same way, with the mean of their values at the
  start of the exchange. The replica's samples so far are multiplied by mix for the next mean, since only this fraction
  of their effect remains in its weights.
Before an evaluation within a round the local weights are replaced by their mean, without an outer step. The round
  continues from this mean, and its outer gradient covers the whole round. Before a checkpoint the inner optimizers'
  state is averaged too. Neither ends a pending exchange. But a checkpoint waits for the exchange's mean, and stores the
  mean and the step at which the mean is due.

Traffic: each of n replicas sends 2 (n - 1) / n of the bytes of parameters and buffers, every `every` steps. Memory per
replica: parameters, gradients and optimizer state once each; the shared weights and the outer momentum in float32 or
wider; while averaging, two more copies of the sent tensors (with `delay` one copy, while the exchange is pending).

This changes the mathematics on purpose.

Follows Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
algorithm 1, which also keeps the inner optimizers' state local. Fragments and delay follow Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), algorithm 2: its tau is `delay`, its alpha is
`mix`. Its 4-bit outer gradients are not implemented.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import ALONE, Group
from paceline.comm.means import PendingMeans
from paceline.errors import SettingError
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.strategies.periodic.periodic_averaging import Fragment, Item, PeriodicAveraging, check_whole
from paceline.world import World

MIX = 0.5
"""The default of `mix` (alpha in the paper)."""


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
    """Raises SettingError for invalid options. The number of processes does not matter."""
    check_whole("diloco", "every", every, 1)
    check_whole("diloco", "fragments", fragments, 1)
    if fragments > every:
        raise SettingError(
            f"strategy diloco: fragments={fragments} with every={every}: each fragment is sent at a separate step of "
            f"a round. Set fragments to {every} at most."
        )
    if not 0 < outer_lr < math.inf:
        raise SettingError(f"strategy diloco: outer_lr={outer_lr!r}: use a learning rate above 0, such as 0.7.")
    if not 0 <= outer_momentum < 1:
        raise SettingError(
            f"strategy diloco: outer_momentum={outer_momentum!r}: use a number of at least 0 and below 1."
        )
    check_whole("diloco", "delay", delay, 0)
    if delay >= every:
        raise SettingError(
            f"strategy diloco: delay={delay} with every={every}: the exchange of a fragment must end before its next "
            "exchange begins. Set delay below every."
        )
    if not 0 <= mix < 1:
        raise SettingError(f"strategy diloco: mix={mix!r}: use a number of at least 0 and below 1.")
    if mix != MIX and not delay:
        raise SettingError(
            f"strategy diloco: mix={mix!r} without delay: there are no later local steps to mix in. Set delay, or "
            "drop mix."
        )
    if average_state and delay:
        raise SettingError(
            f"strategy diloco: average_state=true with delay={delay}: optimizer state is averaged without delay, "
            "which would wait for the network. Drop one of the two."
        )


@dataclass(slots=True, eq=False)
class Exchange:
    """A pending exchange of a fragment's outer gradient."""

    optimizer: torch.optim.Optimizer  # `due` counts its steps
    due: int  # the step at which the mean is used
    parameters: list[Tensor]
    buffers: dict[str, Tensor | None]  # name -> base; the mean is a change from the base (None: a value)
    # Means of the parameters' changes since the last outer step, and of the buffers' changes.
    means: PendingMeans | list[Tensor]

    def wait(self) -> list[Tensor]:
        if isinstance(self.means, PendingMeans):
            self.means = self.means.wait()
        return self.means

    def wait_for_buffers(self) -> dict[str, Tensor]:
        """Wait for the exchange. Returns the mean value of each buffer, by name."""
        found = zip(self.buffers.items(), self.wait()[len(self.parameters) :], strict=True)
        return {name: mean if base is None else base + mean for (name, base), mean in found}


class DiLoCo(PeriodicAveraging):
    """every: inner steps per outer step. outer_lr, outer_momentum: learning rate and momentum of the outer SGD.
    fragments: number of parts of the parameters; each part has a separate outer step. delay: number of inner steps
    during the exchange of an outer gradient. mix: with a delay, the share of the local weights when they are mixed with
    the shared weights. average_state: average the inner optimizers' state too, with the last fragment."""

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
        self._outer: torch.optim.SGD | None = None  # updates the shared weights
        self._exchanges: list[Exchange] = []  # pending exchanges, the same on all replicas
        self._background: Group = ALONE  # the process group for exchanges

    def announcement(self) -> str:
        return (
            "strategy diloco changes the mathematics on purpose: every process trains separate weights on its shards, "
            f"batch norm included, and every {self.every} steps an outer optimizer moves the shared weights by the "
            "mean of their changes."
        )

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().setup(models, optimizers)
        if self.delay:
            self._background = self.mesh.background()

    def steps_to_synchronization(self) -> int:
        # A process cannot pass the step at which a mean is due until all processes have begun the exchange.
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
        """Add shared weights to the outer optimizer."""
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
        """Make one outer step for a fragment's trained parameters."""
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
        """The shared weights, rounded to each parameter's dtype: the values that the replicas started from."""
        return {p: self._shared[p].to(p.dtype).to(self._shared[p].dtype) for p in parameters}

    def _begin(self, optimizer: torch.optim.Optimizer, fragment: Fragment, *, buffers: bool) -> None:
        """Begin the exchange of the outer gradient of a fragment's trained parameters, without waiting."""
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
        """Wait for the mean, make the outer step, and mix the results into the local weights and buffers."""
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
                if not self.mix:  # all replicas have equal weights now
                    fragment.changed = {p: None for p in fragment.changed if p not in ended}
        if exchange.buffers:
            self.scale_buffer_weight(self.mix)

    def _mixed(self, local: Tensor, common: Tensor) -> Tensor:
        """Return mix * local + (1 - mix) * common. Equal elements are returned unchanged, even infinite ones."""
        if not self.mix:
            return common
        wide = local.to(common.dtype)
        return torch.where(wide == common, common, torch.lerp(wide, common, 1 - self.mix))

    def state_dict(self) -> dict[str, Any]:
        """Adds keys to "apart": {"shared": shared weights by name, "momentum": outer momentum by name, "exchanges":
        pending exchanges, each {"optimizer": number, "due": step, "means": means of the parameters' changes by name,
        "buffers": mean values by name}}."""
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
        own = state.get("apart", {})
        by_name = {name: p for p, name in parameter_names(self.models).items()}
        known = {by_name[name]: shared for name, shared in own.get("shared", {}).items() if name in by_name}
        self._shared = {p: shared.to(p.device, copy=True) for p, shared in known.items()}
        self._outer = self._make_outer(list(self._shared.values())) if self._shared else None
        for name, buffer in own.get("momentum", {}).items():
            if self._outer is not None and by_name.get(name) in self._shared:
                shared = self._shared[by_name[name]]
                self._outer.state[shared]["momentum_buffer"] = buffer.to(shared.device, copy=True)
        self._exchanges = [
            self._loaded_exchange(saved, by_name)
            for saved in own.get("exchanges", [])
            if saved["optimizer"] < len(self.optimizers)
        ]

    def _loaded_exchange(self, saved: Mapping[str, Any], by_name: Mapping[str, Tensor]) -> Exchange:
        """Restore an exchange and its mean. It is still due at the saved step, even if this run has other options."""
        parameters = {by_name[name]: mean for name, mean in saved["means"].items() if by_name.get(name) in self._shared}
        means = [mean.to(p.device, copy=True) for p, mean in parameters.items()]
        own = self.named_buffers()
        buffers = {name: mean for name, mean in saved["buffers"].items() if name in own}
        means += [mean.to(own[name].device, copy=True) for name, mean in buffers.items()]
        optimizer = self.optimizers[saved["optimizer"]]
        return Exchange(optimizer, int(saved["due"]), list(parameters), dict.fromkeys(buffers), means)
