"""Find the update at which a resumed run begins, and what differs from the run that was killed. Does not import torch.

The run that was killed is its own reference: its updates after the checkpoint are those that the resumed run must
repeat. The undisturbed run shows what the script does twice alike, and how many updates it makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Update = dict[str, Any]

_FAR = 0.5  # of the distance that training has moved the weights
_NAMES = 3  # tensors that a finding names


@dataclass(frozen=True)
class Difference:
    """Something that the resumed run does not continue with.

    Attributes:
        cause: its name in CAUSES.
        seen: the recorded facts, a sentence.
        at: "file:line", or "".
    """

    cause: str
    seen: str
    at: str = ""

    def as_json(self) -> dict[str, Any]:
        title, remedy = CAUSES[self.cause]
        file, _, line = self.at.rpartition(":")
        return {
            "cause": self.cause,
            "title": title,
            "evidence": self.seen,
            "remedy": remedy,
            "file": file or None,
            "line": int(line) if line.isdecimal() else None,
        }


CAUSES = {  # name -> (title, remedy)
    "nothing_restored": (
        "The resumed run begins from the initial weights",
        "Load the newest checkpoint before training, if there is one; or name the command that does: --resume-args.",
    ),
    "older_checkpoint": (
        "The resumed run begins from an older checkpoint than the newest",
        "Choose the checkpoint by its step as a number (as text, 9 comes after 10), and write it to a temporary name "
        "that is renamed when it is complete.",
    ),
    "weights": (
        "The weights are not those of the run that was killed",
        "Save and load model.state_dict() in the dtype that the optimizer updates.",
    ),
    "buffers": ("Buffers of the model are not restored", "Save model.state_dict(), not only model.parameters()."),
    "copy": (
        "A copy of the model, such as a moving average, is not restored",
        "Save and load its state_dict() too.",
    ),
    "optimizer_state": (
        "The optimizer's state is not restored",
        "Save and load optimizer.state_dict(), after the model has its final device and dtype.",
    ),
    "options": (
        "The learning rate or another option of the optimizer differs",
        "Save and load scheduler.state_dict(); make the scheduler before load_state_dict, and do not step it again.",
    ),
    "loss_scale": ("The loss scale is not restored", "Save and load scaler.state_dict()."),
    "examples_skipped": (
        "The resumed run skips examples",
        "Continue with the batch after the last update: count updates, not batches that were fetched ahead.",
    ),
    "examples_repeated": (
        "The resumed run trains again on examples that it has trained on in this epoch",
        "Continue in mid-epoch: torchdata's StatefulDataLoader, or skip the batches that are done.",
    ),
    "examples_reordered": (
        "The resumed run reads other examples than the run that was killed",
        "Set the seed of the order and the epoch as they were (sampler.set_epoch(epoch)) before batches are skipped.",
    ),
    "augmentations": (
        "The same examples have other values: random augmentations differ",
        "Restore the states of the random generators, or seed augmentations by epoch and example.",
    ),
    "random_numbers": (
        "The gradients differ, because random numbers (dropout, noise) differ",
        "Save and restore torch.get_rng_state() and torch.cuda.get_rng_state() on each rank.",
    ),
    "gradients": (
        "The gradients differ, although all that was recorded is equal",
        "Look for state outside the model, the optimizer and the generators, such as counters and accumulated "
        "gradients.",
    ),
    "length": (
        "The resumed training has another length",
        "Restore the counters of steps and epochs that end the loop.",
    ),
    "failed": ("The resumed run fails", "Read its error above."),
}


@dataclass
class Recorded:
    """The records of one run, of all ranks."""

    ranks: list[list[Update]]  # the updates
    loads: list[Update] = field(default_factory=list)  # what rank 0 has loaded
    ended: bool = False  # whether the script came to its end

    @property
    def updates(self) -> int:
        return min(map(len, self.ranks), default=0)


@dataclass(frozen=True)
class Judged:
    """The result of a comparison.

    Attributes:
        begins: the update of the killed run at which the resumed run begins, from 0; None if it could not be found.
        compared: the number of updates whose examples were compared.
        notes: comparisons that were left out, with the reason.
    """

    begins: int | None
    compared: int
    found: list[Difference]
    notes: list[str]


def compare(undisturbed: Recorded, killed: Recorded, resumed: Recorded, whole: bool) -> Judged:
    """Compare a resumed run with the run that was killed.

    Args:
        whole: both the undisturbed and the resumed run went to their own end.
    """
    first = resumed.ranks[0][0]
    begins, how = _begin(killed.ranks[0], first)
    notes: list[str] = []
    found: list[Difference] = []
    if how == "far" or (begins == 0 and not killed.ranks[0][0]["files"]):  # no checkpoint holds the initial weights
        seen = "Before its first update, the weights are the initial ones of the killed run."
        if how == "far":
            seen = "Before its first update, the weights are far from those before every update of the killed run."
        return Judged(None, 0, [Difference("nothing_restored", seen, _place(resumed, "model", "file"))], notes)
    saves = _saves(killed.ranks[0])
    if len(saves) > 1 and begins <= saves[-2]:
        seen = (
            f"It begins with update {begins + 1}. The last files before the kill were written before update "
            f"{saves[-1] + 1}, those before them before update {saves[-2] + 1}."
        )
        found.append(Difference("older_checkpoint", seen, _place(resumed, "file", "model")))
    found += _state(killed.ranks[0][begins], first, resumed)
    reference = _longest(undisturbed, killed, notes)
    shared = len(resumed.ranks) == len(killed.ranks)
    compared, data = _examples(reference, resumed, begins, shared)
    known = {difference.cause for difference in found}
    found += [difference for difference in data if difference.cause not in known]
    if "order" in notes:
        notes[notes.index("order")] = (
            "Two runs of the script read different examples, so its order is not seeded. The resumed run was compared "
            f"with the {killed.updates - begins} updates before the kill."
        )
    if not found and shared:
        found += _gradients(undisturbed, killed, resumed, begins, notes)
    if whole and undisturbed.ended and resumed.ended:
        total = begins + resumed.updates
        if total != undisturbed.updates:
            seen = f"It ends after update {total}; the undisturbed run ends after update {undisturbed.updates}."
            found.append(Difference("length", seen, _place(resumed, "step")))
    return Judged(begins, compared, found, notes)


def _place(run: Recorded, *kinds: str) -> str:
    for kind in kinds:
        for load in run.loads:
            if load["what"] == kind and load["at"]:
                return f"{load['at'][0]}:{load['at'][1]}"
    at = run.ranks[0][0]["at"] if run.updates else []
    return f"{at[0]}:{at[1]}" if at else ""


def _saves(updates: Sequence[Update]) -> list[int]:
    """The updates, counted from 0, before which files were written.

    Another rank may begin to write while this rank records its update. So of changes at consecutive updates the last
    one counts, and none at the last update.
    """
    changed = [place for place, (a, b) in enumerate(pairwise(updates), 1) if a["files"] != b["files"]]
    return [place for place in changed if place + 1 not in changed and place + 1 < len(updates)]


def save_in_second_epoch(updates: Sequence[Update]) -> int:
    """The first update, counted from 1, after which files appeared in a second pass over the data; 0 if there is none.

    A fault of the order of the data may not show in the first pass.
    """
    seen: set[Any] = set()
    second = False
    for number, (update, following) in enumerate(pairwise(updates), 1):
        rows: set[Any] = {index for batch in update["indices"] for index in batch or ()}  # padding changes rows
        rows = rows or {row for forward in update["inputs"] for row in forward}
        if second and update["files"] != following["files"]:
            return number + 1
        second |= bool(rows & seen)
        seen |= rows
    return 0


# --- where the resumed run begins


def _begin(updates: Sequence[Update], first: Update) -> tuple[int, str]:
    """The update before which the weights are nearest to those before `first`, and "equal", "near" or "far"."""
    mine = first["state"].get("weight", {})
    distances = [
        (_distance(update["state"].get("weight", {}), mine), -number)
        for number, update in enumerate(updates)
        if update["optimizer"] == first["optimizer"]
    ]
    least, number = min(distances, default=(float("inf"), 0))
    moved = _distance(updates[0]["state"].get("weight", {}), updates[-1]["state"].get("weight", {}))
    how = "equal" if least == 0 else "far" if least > _FAR * moved else "near"
    return -number, how


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The relative distance of two groups of tensors, in the recorded elements."""
    square = base = 0.0
    for name in one.keys() & other.keys():
        if one[name][0] == other[name][0]:
            continue
        square += sum((a - b) ** 2 for a, b in zip(one[name][2:], other[name][2:]))
    for name in one:
        base += sum(a**2 for a in one[name][2:])
    if not one.keys() & other.keys():
        return float("inf")
    if square == 0 and any(one[n][0] != other[n][0] for n in one.keys() & other.keys()):
        return 1e-30  # they differ in elements that were not recorded
    return (square / base) ** 0.5 if base else square**0.5


# --- its state


def _state(theirs: Update, own: Update, resumed: Recorded) -> Iterable[Difference]:
    before, after = theirs["state"], own["state"]
    wrong = {
        group: [n for n, it in tensors.items() if after.get(group, {}).get(n, [None])[:2] != it[:2]]
        for group, tensors in before.items()
    }
    for group, cause in _MODEL.items():
        if wrong.get(group):
            seen = _wrong(before[group], after.get(group, {}), wrong[group], _WORDS[group])
            if group == "weight" and own["half"] and own["half"] != theirs["half"]:
                seen += f" All weights are numbers of {own['half']}: they were rounded to that precision."
            yield Difference(cause, seen, _place(resumed, "model", "file"))
    keys = [group for group in before if group not in _MODEL and wrong[group]]
    if keys:
        key = max(keys, key=lambda one: before[one].keys() - after.get(one, {}).keys() != set())
        seen = _wrong(before[key], after.get(key, {}), wrong[key], f'"{key}" of the optimizer')
        others = [f'"{one}"' for one in keys if one != key]
        seen += f" {_list(others)} differ{'s' if len(others) == 1 else ''} too." if others else ""
        yield Difference("optimizer_state", seen, _place(resumed, "optimizer", "file"))
    yield from _options(theirs, own, resumed, "Before its first update")
    if theirs["scale"] != own["scale"]:
        seen = f"Before its first update the loss scale is {_list(own['scale'])} instead of {_list(theirs['scale'])}."
        yield Difference("loss_scale", seen, _place(resumed, "scaler", "file"))


_MODEL = {"weight": "weights", "buffer": "buffers", "copy": "copy"}
_WORDS = {"weight": "the weight", "buffer": "the buffer", "copy": "the copy of the model"}


def _wrong(before: dict[str, Any], after: dict[str, Any], wrong: list[str], what: str) -> str:
    """Say how tensors differ: missing, another dtype, or other values."""
    missing = [name for name in wrong if name not in after]
    if missing:
        return f"Before its first update, {what} is missing for {_list(missing)}."
    dtypes = [n for n in wrong if before[n][1] != after[n][1]]
    if dtypes:
        name = dtypes[0]
        return f"Before its first update, {what} of {_list(dtypes)} has dtype {after[name][1]}, not {before[name][1]}."
    off = _distance({n: before[n] for n in wrong}, {n: after[n] for n in wrong})
    numbers = [n for n in wrong if len(before[n]) == 3]
    if len(numbers) == len(wrong):
        name = numbers[0]
        return (
            f"Before its first update, {what} of {_list(wrong)} is {after[name][2]:g}; the killed run had "
            f"{before[name][2]:g}."
        )
    return (
        f"Before its first update, {what} differs for {_list(wrong)}: by {off:.2g} of their norm, in up to 16 elements "
        "of each."
    )


def _options(theirs: Update, own: Update, resumed: Recorded, when: str) -> Iterable[Difference]:
    for number, (before, after) in enumerate(zip(theirs["options"], own["options"])):
        for name in before:
            if before[name] != after.get(name):
                seen = (
                    f"{when}, {name} of parameter group {number} is {after.get(name, 'missing')!r}; the killed run had "
                    f"{before[name]!r}."
                )
                yield Difference("options", seen, _place(resumed, "scheduler", "optimizer", "file"))
                return


def _list(names: Iterable[Any]) -> str:
    found = [f"{name:g}" if isinstance(name, float) else str(name) for name in names]
    more = len(found) - _NAMES
    return ", ".join(found[:_NAMES]) + (f" and {more} more" if more > 0 else "") if found else "none"


# --- its examples


def _longest(undisturbed: Recorded, killed: Recorded, notes: list[str]) -> Recorded:
    """The killed run, continued by the updates of the undisturbed run, if both read the same examples."""
    same = all(
        [u["inputs"] for u in mine[: len(theirs)]] == [u["inputs"] for u in theirs[: len(mine)]]
        for mine, theirs in zip(undisturbed.ranks, killed.ranks)
    )
    if not same:
        notes.append("order")
        return killed
    return Recorded([theirs + mine[len(theirs) :] for mine, theirs in zip(undisturbed.ranks, killed.ranks)])


def _union(run: Recorded, number: int) -> list[str]:
    return sorted(row for rank in run.ranks for forward in rank[number]["inputs"] for row in forward)


def _examples(reference: Recorded, resumed: Recorded, begins: int, shared: bool) -> tuple[int, list[Difference]]:
    """Compare the examples of the updates; on another number of processes, of all ranks together."""
    count = min(reference.updates - begins, resumed.updates)
    place = _place(resumed, "loader")
    for number in range(count):
        if shared:
            pairs = [
                (theirs[begins + number]["inputs"], mine[number]["inputs"])
                for theirs, mine in zip(reference.ranks, resumed.ranks)
            ]
            same = all(one == other for one, other in pairs)
        else:
            same = _union(reference, begins + number) == _union(resumed, number)
        if not same:
            equal = sum(_union(reference, begins + later) == _union(resumed, later) for later in range(number, count))
            cause, seen = _kind(reference, resumed, begins, number)
            seen += f" Of the next {count - number} updates, {equal} use the same examples."
            return number, [Difference(cause, seen, place)]
        options = list(
            _options(
                reference.ranks[0][begins + number],
                resumed.ranks[0][number],
                resumed,
                f"At update {begins + number + 1}",
            )
        )
        if number and options:
            return number + 1, options
    return count, []


def _kind(reference: Recorded, resumed: Recorded, begins: int, number: int) -> tuple[str, str]:
    mine, expected = set(_union(resumed, number)), set(_union(reference, begins + number))
    here = begins + number
    where = f"Update {here + 1}"
    if mine == expected:
        return "examples_reordered", f"{where} uses the same examples in another order, or on other ranks."
    places = [place for place in range(reference.updates) if mine and set(_union(reference, place)) == mine]
    if places:
        nearest = min(places, key=lambda place: abs(place - here))
        seen = f"{where} uses the examples that the killed run used at update {nearest + 1}."
        return "examples_skipped" if nearest > here else "examples_repeated", seen
    known = {row for place in range(reference.updates) for row in _union(reference, place)}
    if 2 * len(mine & known) <= len(mine) and _same_indices(reference, here, resumed, number):
        return "augmentations", f"{where} reads the same indices of the data set, with other values."
    used = {row for place in range(here) for row in _union(reference, place)}
    again = len(mine & used)
    if 2 * again > len(mine) and 2 * len(expected & used) <= len(expected):
        seen = f"{where} uses {again} of {len(mine)} examples that were used before the checkpoint."
        return "examples_repeated", seen
    return "examples_reordered", f"{where} uses other examples than the killed run."


def _same_indices(reference: Recorded, here: int, resumed: Recorded, number: int) -> bool:
    """Whether two updates read the same indices. A resumed run may first read batches that it skips."""
    batches = max(len(rank[here]["indices"]) for rank in reference.ranks)

    def last(run: Recorded, place: int) -> set[int]:
        return {index for rank in run.ranks for batch in rank[place]["indices"][-batches:] for index in batch or ()}

    theirs = last(reference, here)
    return bool(theirs) and theirs == last(resumed, number)


# --- its gradients


def _gradients(
    undisturbed: Recorded, killed: Recorded, resumed: Recorded, begins: int, notes: list[str]
) -> Iterable[Difference]:
    """Compare the gradients of the updates before the kill, if two runs of the script compute the same bits."""
    both = min(undisturbed.updates, killed.updates)
    same = all(
        one["gradients"] == other["gradients"]
        for mine, theirs in zip(undisturbed.ranks, killed.ranks)
        for one, other in zip(mine[:both], theirs[:both])
    )
    if not same:
        notes.append("Two runs of the script compute different gradients, so the gradients were not compared.")
        return
    for number in range(min(resumed.updates, killed.updates - begins)):
        for rank, (mine, theirs) in enumerate(zip(resumed.ranks, killed.ranks)):
            one, other = mine[number], theirs[begins + number]
            wrong = [name for name, found in other["gradients"].items() if one["gradients"].get(name) != found]
            if not wrong:
                continue
            drawn = [name for name in other["random"] if one["random"].get(name) != other["random"][name]]
            seen = f"At update {begins + number + 1} on rank {rank}, the gradients of {_list(wrong)} differ."
            if drawn:
                seen += f" The weights and examples are equal; the states of {_list(drawn)} are not."
                yield Difference("random_numbers", seen, _place(resumed, "random", "file"))
            else:
                yield Difference("gradients", seen, _place(resumed, "step"))
            return
