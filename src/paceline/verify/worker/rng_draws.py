"""Detect whether random numbers were drawn."""

from __future__ import annotations

import hashlib

import torch

from paceline.comm import generators
from paceline.data.noise import Noise
from paceline.observe.digests import digest


def generator_states(device: torch.device) -> tuple[list[str], str]:
    """Return (digests of the states of torch's generators, one digest for NumPy's and Python's generators)."""
    state = generators.get_state(device)
    torch_own = [digest(state[key]) for key in ("torch", "device") if key in state]
    rest = hashlib.sha1(repr((state["python"], state["numpy"])).encode(), usedforsecurity=False)
    rest.update(state["numpy"][1].tobytes())
    return torch_own, rest.hexdigest()[:16]


class RandomDraws:
    """Detects whether numbers were drawn from torch's generators since `remember` was called.

    noise: the object that keys draws by example, if noise="example". Keyed draws do not count.
    """

    def __init__(self, device: torch.device, noise: Noise | None = None) -> None:
        self._device, self._noise, self._undone = device, noise, 0
        self._known: set[str] = set()
        # A digest of NumPy's and Python's generators. Processes that draw the same numbers have the same digest.
        self.others = ""

    def remember(self, *keys: int) -> None:
        """Remember the states of the generators.

        keys: seeds that torch's generator may get before `drawn` is called. Seeding does not count as a draw.
        """
        states, self.others = generator_states(self._device)
        self._undone = 0 if self._noise is None else self._noise.unkeyed
        self._known = {*states, *(digest(torch.Generator().manual_seed(key).get_state()) for key in keys)}

    def drawn(self) -> bool:
        """Whether numbers were drawn since `remember` was called."""
        states, self.others = generator_states(self._device)
        if self._noise is not None:
            return bool(self._known) and self._noise.unkeyed > self._undone
        return bool(self._known) and any(state not in self._known for state in states)
