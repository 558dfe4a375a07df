"""diloco: independent replicas train for many steps; an outer optimizer updates the shared weights by their mean
change.

Phase 1, inner steps: as local_sgd. Each replica updates its own weights by its own shards; nothing travels.
Phase 2, every `every` steps of an optimizer, the outer step. The outer gradient is (shared weights - local weights),
  averaged over the replicas in one all-reduce, weighted by their examples (or tokens) since the last. With it
  torch.optim.SGD(outer_lr, outer_momentum, nesterov=True) updates the shared weights, the same on all replicas, and
  they become the local ones. Buffers become their mean.
With `fragments=P` the parameters are cut into P runs, about equally large, and the p-th (from 1) has its outer step at
  step p / P of each round: a P-th of the bytes at a time. Buffers go with the last.
Before an evaluation in mid-round the local weights become their mean, without an outer step: the round goes on from
there, and its outer gradient is that of the whole round. Before a checkpoint the inner optimizers' state does too.

Between replicas: parameters and buffers, 2 (n - 1) / n of their bytes sent by each of n replicas, every `every` steps.
Memory per replica: parameters, gradients and optimizer state once each; the shared weights and the outer momentum in
float32 or wider; while averaging, what is sent twice more.

This changes the mathematics on purpose.

Follows Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
algorithm 1, in which the inner optimizers' state stays on its replica; and for fragments Douillard et al. 2025,
"Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), without its overlap with later inner steps and
without its 4-bit outer gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import SettingError
from paceline.strategies.periodic_averaging import Fragment, Item, PeriodicAveraging, check_whole
from paceline.strategies.replicated import parameter_names
from paceline.world import World


def check(size: int | None, *, every: int, outer_lr: float, outer_momentum: float, fragments: int) -> None:
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


class DiLoCo(PeriodicAveraging):
    """every: inner steps from one outer step to the next. outer_lr, outer_momentum: of the outer SGD. fragments: into
    how many the parameters are cut, which have their outer steps one after the other. average_state: average the inner
    optimizers' state too, with the last fragment."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        average_state: bool = False,
    ) -> None:
        check(world.size, every=every, outer_lr=outer_lr, outer_momentum=outer_momentum, fragments=fragments)
        super().__init__(world, device, fragments=fragments)
        self.every, self.average_state = every, average_state
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self._shared: dict[Tensor, Tensor] = {}  # parameter -> the shared weights, since its first training step
        self._outer: torch.optim.SGD | None = None  # over the shared weights

    def announcement(self) -> str:
        return (
            "strategy diloco changes the mathematics on purpose: every process trains its own weights on its own "
            f"shards, batch norm included, and every {self.every} steps an outer optimizer moves the shared ones "
            "by the mean of what they have learned."
        )

    def steps_to_meeting(self) -> int:
        return self.every - self.steps[self.optimizers[0]] % self.every

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        fragments = self.fragments_of(optimizer)
        new = [p for part in fragments for p in part.parameters if p.requires_grad and p not in self._shared]
        self._share({p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in new})
        self.update(optimizer)
        for number, fragment in enumerate(fragments, start=1):
            if (self.steps[optimizer] - self.every * number // self.fragments) % self.every == 0:
                last = number == self.fragments
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
        # The replicas started from the shared weights as rounded to the parameter's dtype.
        bases = {p: self._shared[p].to(p.dtype).to(self._shared[p].dtype) for p in trained}

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

    def state_dict(self) -> dict[str, Any]:
        """In "apart" further {"shared": weights by name, "momentum": outer momentum by name}."""
        whole = super().state_dict()
        names = parameter_names(self.models)
        state = self._outer.state if self._outer is not None else {}
        momentum = {p: state.get(shared, {}).get("momentum_buffer") for p, shared in self._shared.items()}
        whole["apart"]["shared"] = {names[p]: shared for p, shared in self._shared.items()}
        whole["apart"]["momentum"] = {names[p]: buffer for p, buffer in momentum.items() if buffer is not None}
        return whole

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
