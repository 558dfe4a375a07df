"""What `paceline verify` watches in a step beside its results: numbers drawn, and gradients changed on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm import generators
from paceline.run import Run
from paceline.train.loss import Total
from paceline.train.noise import Noise
from paceline.trial import plain


def generator_states(device: torch.device) -> tuple[list[str], str]:
    """(digests of the states of torch's generators; of NumPy's and Python's together)."""
    state = generators.get_state(device)
    torch_own = [plain.digest(state[key]) for key in ("torch", "device") if key in state]
    rest = hashlib.sha1(repr((state["python"], state["numpy"])).encode(), usedforsecurity=False)
    rest.update(state["numpy"][1].tobytes())
    return torch_own, rest.hexdigest()[:16]


class Draws:
    """Whether torch's generators were drawn from since they were last marked. noise: with noise="example", what keys
    draws by the example, which then do not count."""

    def __init__(self, device: torch.device, noise: Noise | None = None) -> None:
        self._device, self._noise, self._undone = device, noise, 0
        self._known: set[str] = set()
        self.others = ""  # NumPy's and Python's, which are alike on all processes while the same is drawn from them

    def mark(self, *keys: int) -> None:
        """keys: with which torch's generator may be seeded anew."""
        states, self.others = generator_states(self._device)
        self._undone = 0 if self._noise is None else self._noise.undone
        self._known = {*states, *(plain.digest(torch.Generator().manual_seed(key).get_state()) for key in keys)}

    def drawn(self) -> bool:
        states, self.others = generator_states(self._device)
        if self._noise is not None:
            return bool(self._known) and self._noise.undone > self._undone
        return bool(self._known) and any(state not in self._known for state in states)


class Accumulating:
    """Gradients between two backward calls of a step whose last micro-batch is still to come: nobody changes them."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def keep(self, gradients: Mapping[str, Tensor] | None) -> None:
        """None: the step's last backward was made, and they may be changed."""
        self._digests = {name: plain.digest(gradient) for name, gradient in (gradients or {}).items()}

    def changed(self, gradients: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Whether one has other values; not whether they were cleared."""
        if not self._digests:
            return False
        found = gradients()
        other = [g for name, g in found.items() if self._digests.get(name) != plain.digest(g)]
        return bool(other) and any(bool(g.any()) for g in other)


class Watch:
    """The backward calls of a run. now: the record of the step (kept.py), or None."""

    def __init__(self, run: Run, now: Callable[[], dict[str, Any] | None]) -> None:
        self._run, self._now = run, now
        self.draws = Draws(run.device, run._noise)
        self._accumulating = Accumulating()
        self.asked = False  # whether the script has asked all processes for something since the yield or the update

    def asking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of what a script asks all processes with."""

        def asked(*values: Any, **named: Any) -> Any:
            self.asked = True
            return method(*values, **named)

        return asked

    def drew(self, draws: Draws | None = None) -> None:
        draws, now = draws or self.draws, self._now()
        if now is not None:
            now["drew"] |= draws.drawn()
            now["others"] = sorted({*now["others"], draws.others})

    def begins_backward(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        now = self._now()
        if now is not None and self._accumulating.changed(gradients):
            now["clipped_early"] += 1
        self.drew()

    def ends_backward(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """gradients: of this rank alone, while the step's last micro-batch is still to come."""
        current, now = self._run.latest.current if self._run.latest is not None else None, self._now()
        self._accumulating.keep(gradients() if current is not None and not current.final else None)
        if now is not None and self.asked and not now["updates"]:
            now["gathered"] = True
        self.draws.mark()  # a backward call has seeded them anew


class Hook:
    """In the place of a hook on a gradient: tells whether it changes it."""

    def __init__(self, hook: Callable[[Tensor], Any], changed: Callable[[], object]) -> None:
        self._hook, self._changed = hook, changed

    def __call__(self, gradient: Tensor) -> Any:
        before = gradient.clone()
        made = self._hook(gradient)
        if not torch.equal(gradient if made is None else made, before):
            self._changed()
        return made


def watch_hooks(names: Mapping[Tensor, str], changing: set[str]) -> None:
    """changing: filled with the names of parameters on which a hook changes gradients."""
    for parameter, name in names.items():
        hooks = parameter._backward_hooks or {}
        for key, hook in hooks.items():
            if not isinstance(hook, Hook):
                hooks[key] = Hook(hook, lambda name=name: changing.add(name))  # type: ignore[misc]


def silenced(loss: Any) -> Any:
    """Times zero; counts stay."""
    if isinstance(loss, Total):
        return Total(loss.sum * 0, loss.count)
    if isinstance(loss, (tuple, list)):
        return tuple(silenced(one) for one in loss)
    return loss * 0
