"""Carries collectives where processes may come and go. The groups of torch.distributed cannot lose a member.

The strategy that has a channel sets it on its mesh (`Mesh.channel`). Members are the processes that took part in the
last exchange. So all live processes agree on who the members are, and membership changes at the same place in the
program for all.

A process may join while the others are under way. It prepares everything and waits in `arrive`, which the run calls
where its epochs begin, until the others admit it. One of them then hands over the position of the run (Handover).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

Phase = Literal["between", "training", "evaluating"]
"""between: outside of loaders. training: from a training loader's first yield to its end. evaluating: in an evaluation
loader's pass."""


class Handover(Protocol):
    """The position of a run, beside what the owner of the channel knows itself."""

    def capture(self) -> Any:
        """This member's position in the program; of types that plain_state.py knows. Every member calls it."""

    def restore(self, captured: Any) -> None:
        """This member goes on from that position."""


class Channel(ABC):
    """The live members of a run, seen from one of them."""

    handover: Handover | None = None  # set by the run
    in_step: bool  # whether all members make the same steps together: only then may they exchange in a training batch

    @property
    @abstractmethod
    def size(self) -> int:
        """How many members there are."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The index of this member, from 0; it becomes smaller when earlier members die."""

    @abstractmethod
    def exchange(self, parts: Iterable[Any] = ()) -> list[memoryview]:
        """Every member's bytes, in rank order. parts: this member's bytes, in pieces. Raises WorldError with the rank
        of a member that has died and whose bytes are needed."""

    @abstractmethod
    def enter_phase(self, phase: Phase, meet: bool = False, loader: str | None = None) -> bool:
        """The program begins this phase. meet: all members call it together, and dead ones are no members from then on.
        loader: the training loader whose pass begins or ends here. Returns False in a member that has joined since,
        where the others have made this pass already."""

    def arrive(self) -> None:
        """Called where the run's epochs begin. A process that joins is admitted here."""
        return None

    @property
    def arriving(self) -> bool:
        """Whether this process joins, and was not admitted yet."""
        return False

    @abstractmethod
    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        """Adds pairs to a store that all members share. With `take` it empties the store and returns what was in it.
        Nobody waits for anybody: for members that are not in step."""
