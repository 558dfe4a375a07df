"""Whether a rank leaves out an update, from the order of its updates and collectives (observe/update_order.py).

All ranks make the same collectives in the same order. So if two ranks make an update between different collectives, one
of them has left out an update. The ranks may hang or abort because of this fault.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from paceline.observe.update_order import COLLECTIVE, JOIN, UPDATE, read_order
from paceline.verify.answer import DIFFERENT, Answer, Claim


def answer_for_left_out_update(folder: str, processes: int) -> Answer | None:
    """An answer if a rank of the subject run makes an update that another rank leaves out. folder: of the run."""
    orders = [read_order(folder, rank) for rank in range(processes)]
    updates = [[place for place, (what, *_) in enumerate(order) if what == UPDATE] for order in orders]
    joins = any(what == JOIN for order in orders for what, *_ in order)
    if not all(orders) or not any(updates) or joins:
        return None
    # the number of collectives before each update
    counts = [[place - number for number, place in enumerate(places)] for places in updates]
    if any(after <= before for places in counts for before, after in pairwise(places)):
        return None  # updates without a collective between them: the ranks may train alone for a while (local SGD)
    totals = [len(order) - len(places) for order, places in zip(orders, updates, strict=True)]
    for step in range(max(map(len, counts))):
        made = {rank: found[step] for rank, found in enumerate(counts) if step < len(found)}
        first = min(made, key=lambda rank: made[rank])
        for rank in range(processes):
            if made.get(rank, totals[rank]) > made[first]:
                return _answer(first, rank, step, orders[first][: updates[first][step] + 1])
    return None


def _answer(maker: int, other: int, step: int, before: list[list[Any]]) -> Answer:
    """before: the lines of the rank that makes the update, up to the update."""
    text = (
        f"different. Rank {maker} makes update {step + 1} between two collectives of all ranks, and rank {other} makes "
        "none there: a decision of the script, such as leaving out an update, differs between the ranks.\n"
        "Remedy: reduce the value that decides over all ranks, and wait for it, before the decision."
    )
    answer = Answer(DIFFERENT, [Claim(text, ("A",))], step, "updates", None, "steps_differ")
    at = before[-1][1:]
    decided = next((place for what, *place in reversed(before) if what == COLLECTIVE and place), at)
    if decided:
        answer.file, answer.line = decided
        answer.claims.append(Claim(f"\nThe last collective before it is at {decided[0]}:{decided[1]}.", ("A",)))
    answer.beside = f"{at[0]}:{at[1]}" if at and at != decided else None
    return answer
