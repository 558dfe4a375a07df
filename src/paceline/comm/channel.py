"""What collectives go through where processes may come and go, in place of torch.distributed, whose groups cannot lose
a member.

A channel is installed by the strategy that has one (`collectives.use`), and counts only members that live. Its members
are those that took part in the last exchange: so all that live see the same, and change their view at the same place in
the program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Phase = Literal["between", "training", "evaluating"]
"""between: outside of loaders. training: from a training loader's first yield to its end. evaluating: in an evaluation
loader's pass."""


class Channel(ABC):
    """The live members of a run, seen from one of them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many members there are."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This one's place among them, from 0; it may fall when others go."""

    @abstractmethod
    def exchange(self, parts: Iterable[Any] = ()) -> list[memoryview]:
        """Every member's bytes, in rank order. `parts` are the pieces of this one's. Raises WorldError, naming the
        rank, where a member has gone and its part cannot be done without."""

    @abstractmethod
    def enter(self, phase: Phase, meet: bool = False) -> None:
        """Where the program is from now on. meet: all members come here together, and those that have gone are left out
        from then on."""

    @abstractmethod
    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        """Adds pairs to a store that all members share, and, with `take`, empties it and returns what was in it. For
        members that are not in step: nobody waits for anybody."""

    @property
    @abstractmethod
    def in_step(self) -> bool:
        """Whether all members make the same steps together, so that they may exchange in a training batch."""
