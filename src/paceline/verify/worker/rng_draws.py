"""Whether random numbers were drawn."""

from __future__ import annotations

import hashlib

import torch

from paceline.comm import generators
from paceline.data.noise import Noise
from paceline.observe.digests import digest


def generator_states(device: torch.device) -> tuple[list[str], str]:
    """(digests of the states of torch's generators, a digest of NumPy's and Python's together)."""
    state = generators.get_state(device)
    torch_own = [digest(state[key]) for key in ("torch", "device") if key in state]
    rest = hashlib.sha1(repr((state["python"], state["numpy"])).encode(), usedforsecurity=False)
    rest.update(state["numpy"][1].tobytes())
    return torch_own, rest.hexdigest()[:16]


class RandomDraws:
    """Whether torch's generators were drawn from since `remember` was called.

    noise: with noise="example", what keys draws by the example. Such draws do not count.
    """

    def __init__(self, device: torch.device, noise: Noise | None = None) -> None:
        self._device, self._noise, self._undone = device, noise, 0
        self._known: set[str] = set()
        # The state of NumPy's and Python's generators. It is alike on all processes while they draw the same numbers.
        self.others = ""

    def remember(self, *keys: int) -> None:
        """Remember the states of the generators.

        keys: seeds with which torch's generator may be seeded anew; that is no draw.
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
