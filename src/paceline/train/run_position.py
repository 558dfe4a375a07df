"""Where a run is, for a process that joins it under way: what a checkpoint holds beside models and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.train.progress import Epochs
from paceline.train.state import State
from paceline.train.step import Stepper


class Handover:
    """comm.channel.Handover of a run. give_more, take_more: of what stands above this room, the monitor."""

    def __init__(
        self,
        state: State,
        stepper: Stepper,
        epochs: Epochs,
        give_more: Callable[[], Any],
        take_more: Callable[[Any], None],
    ) -> None:
        self._state, self._stepper, self._epochs = state, stepper, epochs
        self._give_more, self._take_more = give_more, take_more

    def counters(self) -> dict[str, Any]:
        """As a checkpoint has them."""
        stepper = self._stepper
        skipped = stepper.skipped + stepper.sat_out
        counts = {"updates": list(stepper.updates.values()), "skipped": skipped, "by_hand": stepper.by_hand}
        return {**counts, "epochs": self._epochs.state_dict()}

    def put_back(self, found: dict[str, Any]) -> None:
        stepper = self._stepper
        stepper.updates = dict(zip(stepper.updates, found["updates"], strict=True))
        stepper.skipped, stepper.sat_out = found["skipped"], 0
        stepper.by_hand = found.get("by_hand", 0)  # older checkpoints have none
        self._epochs.load_state_dict(found["epochs"])

    def capture(self) -> dict[str, Any]:
        return {"counters": self.counters(), "state": self._state.place(), "more": self._give_more()}

    def restore(self, given: dict[str, Any]) -> None:
        self._state.put_place(given["state"])
        self.put_back(given["counters"])
        self._take_more(given["more"])
