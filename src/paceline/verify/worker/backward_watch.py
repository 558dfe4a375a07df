"""Record events around the backward calls of a step: random draws, changed gradients, trained tensors in no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data.noise import Noise
from paceline.observe.digests import digest
from paceline.run import Run
from paceline.step.loss import Total
from paceline.torch_private.core import backward_hooks
from paceline.verify.worker.rng_draws import RandomDraws


class AccumulatedGradients:
    """Detects whether a script changes gradients before the last backward call of a step, which is a fault."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def remember(self, gradients: Mapping[str, Tensor] | None) -> None:
        """Remember these gradients. None: this was the step's last backward, so the script may change gradients."""
        self._digests = {name: digest(gradient) for name, gradient in (gradients or {}).items()}

    def changed(self, gradients: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Whether a gradient has changed since `remember`. Clearing gradients does not count."""
        if not self._digests:
            return False
        found = gradients()
        other = [g for name, g in found.items() if self._digests.get(name) != digest(g)]
        return bool(other) and any(bool(g.any()) for g in other)


class BackwardWatch:
    """Records events around the backward calls of a run.

    now: returns the record of the current step (record_files.py), or None.
    """

    def __init__(self, run: Run, noise: Noise | None, now: Callable[[], dict[str, Any] | None]) -> None:
        self._run, self._now = run, now
        self.draws = RandomDraws(run.device, noise)
        self._accumulated = AccumulatedGradients()
        # Whether the script has communicated with all processes since the last yield or update.
        self.asked_all_ranks = False

    def note_draws(self, draws: RandomDraws | None = None) -> None:
        """Record whether random numbers were drawn."""
        draws, now = draws or self.draws, self._now()
        if now is not None:
            now["drew"] |= draws.drawn()
            now["others"] = sorted({*now["others"], draws.others})

    def before_backward(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Record whether gradients were changed since the last backward."""
        now = self._now()
        if now is not None and self._accumulated.changed(gradients):
            now["clipped_early"] += 1
        self.note_draws()

    def after_backward(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Remember the local gradients of this rank, if the step's last micro-batch is still to come."""
        current, now = self._run.latest.current if self._run.latest is not None else None, self._now()
        self._accumulated.remember(gradients() if current is not None and not current.final else None)
        if now is not None and self.asked_all_ranks and not now["updates"]:
            now["gathered"] = True
        self.draws.remember()  # the backward call has seeded the generators again


class WatchedHook:
    """Replaces a hook on a gradient, and reports whether the hook changes it."""

    def __init__(self, hook: Callable[[Tensor], Any], changed: Callable[[], object]) -> None:
        self._hook, self._changed = hook, changed

    def __call__(self, gradient: Tensor) -> Any:
        before = gradient.clone()
        made = self._hook(gradient)
        if not torch.equal(gradient if made is None else made, before):
            self._changed()
        return made


def watch_hooks(names: Mapping[Tensor, str], changing: set[str]) -> None:
    """Watch the hooks on the gradients of these parameters. If a hook changes a gradient, the name of the parameter is
    added to `changing`."""
    for parameter, name in names.items():
        hooks = backward_hooks(parameter) or {}
        for key, hook in hooks.items():
            if not isinstance(hook, WatchedHook):
                hooks[key] = WatchedHook(hook, lambda name=name: changing.add(name))  # type: ignore[misc]


def zeroed(loss: Any) -> Any:
    """The loss times zero. Counts are kept."""
    if isinstance(loss, Total):
        return Total(loss.sum * 0, loss.count)
    if isinstance(loss, (tuple, list)):
        return tuple(zeroed(one) for one in loss)
    return loss * 0


def leaves_outside(roots: Iterable[Tensor], known: Collection[Tensor]) -> list[Tensor]:
    """The tensors, except the `known` tensors, that get gradients from the backward of these losses."""
    nodes = [node for root in roots if (node := root.grad_fn) is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and variable not in known:
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
