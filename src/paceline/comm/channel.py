"""What collectives go through where processes may come and go, in place of torch.distributed, whose groups cannot lose
a member.

The strategy that has a channel sets it on its mesh (`Mesh.channel`). A channel counts only members that live: those
that took part in the last exchange. So all that live see the same members, and change their view at the same place in
the program.

A member may also come while the others are under way. It makes everything ready, and waits in `arrive`, which the run
calls where its epochs begin, until the others let it in; one of them then hands over where the run is (Handover).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

Phase = Literal["between", "training", "evaluating"]
"""between: outside of loaders. training: from a training loader's first yield to its end. evaluating: in an evaluation
loader's pass."""


class Handover(Protocol):
    """Where a run is, beside what the channel's owner knows itself."""

    def give(self) -> Any:
        """Of this member, in the middle of its program; it can be pickled. Every member calls it."""

    def take(self, given: Any) -> None:
        """This member goes on there."""


class Channel(ABC):
    """The live members of a run, seen from one of them. handover: set by the run."""

    handover: Handover | None = None

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
    def enter(self, phase: Phase, meet: bool = False, loader: str | None = None) -> bool:
        """Where the program is from now on. meet: all members come here together, and those that have gone are left out
        from then on. loader: the training loader whose pass begins or ends here. False, for one that came meanwhile:
        the others have this pass behind them."""

    def arrive(self) -> None:
        """Where the run's epochs begin: a member that comes while the others are under way is let in here."""
        return None

    @property
    def arriving(self) -> bool:
        """Whether this member has come, and has not been let in yet."""
        return False

    @abstractmethod
    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        """Adds pairs to a store that all members share, and, with `take`, empties it and returns what was in it. For
        members that are not in step: nobody waits for anybody."""

    @property
    @abstractmethod
    def in_step(self) -> bool:
        """Whether all members make the same steps together, so that they may exchange in a training batch."""
