"""Nothing hangs in silence: say which rank waits where, in which call, which rank has not come there, and why.

A rank that makes a collective call alone (`if run.main: run.save(...)`), or a step more than the others, waits for the
process group's timeout, 30 minutes; so do the others of a rank that is stopped, or loops, or waits for a disk. The
one may be busy with something long. So no rank is ended, unless the user asked for it (--stall-action), or it is proved
that they wait in vain (`in_vain`).

1. Every few seconds read the state of all ranks of this machine in /proc, and sample their stacks (stacks.py).
2. Either a rank waits: its stack has not changed for the limit (--stall-timeout) and is in communication. Or a rank has
   been stopped for so long. Or no rank at all has moved. A rank that takes another batch moves, wherever it is found:
   it counts its batches in a file (step/heartbeat.py). So does one that runs code in Python which is no wait.
3. Then say where all of them are, and in which collective call, by torch's flight recorder: of what is queued on a GPU
   the stack does not tell. Say it again after twice that time, four times, and so on while it lasts.

A rank that has ended, with exit code 0, while others go on may be right: rank 0 exports the model, and the others have
nothing left to do. It is said after LEFT_SECONDS. A rank that has then not moved for STUCK_SECONDS, and is in
communication, waits in vain: the run is ended.

Without a limit of the user's it is STALL_SECONDS, or USUAL_TIMES the time that the run usually takes for a batch. On
CPUs it is DEADLOCK_SECONDS where all ranks of the run wait in collectives or in a backward, which cannot match then,
and none uses a core or has a thread that does something. That a rank is stopped is said after STOPPED_SECONDS.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.errors import LaunchError
from paceline.launcher import process_state, stack_thread
from paceline.launcher.output import say
from paceline.launcher.process_state import ProcessState, read_state
from paceline.launcher.report import exits_in_words, name_ranks
from paceline.launcher.stacks import (
    StackSample,
    in_collective,
    is_waiting,
    may_wait,
    sample_loader_workers,
    sample_stacks,
)
from paceline.torch_private.flight_recorder import Call, GroupCalls
from paceline.world import BEAT, LEFT, read_beat, told

STALL_SECONDS = 60.0
USUAL_TIMES = 20
DEADLOCK_SECONDS = 10.0
STOPPED_SECONDS = 5.0
POLL_SECONDS = 4.0  # between two looks, at most
_SOON_SECONDS = 1.0  # the same, when the limit is near
LEFT_SECONDS = 10.0  # after the first rank has ended
STUCK_SECONDS = 30.0
_LEFT_POLL_SECONDS = 2.0  # between two looks from then on
_OTHERS_FIRST_SECONDS = 4.0  # where no rank of this machine is to blame: for the machine whose rank is, to end the run
_CALLS_SECONDS = 2.0  # for the ranks to tell their collective calls, which takes them some 0.1 s
_SUSPENDED_SECONDS = 30.0  # without a look: the launcher itself was stopped, and has seen nothing
_BUSY = 0.5  # of a core: a process that uses more computes
_IDLE = 0.1  # a process that uses less waits, and moves no data meanwhile

ACTIONS = ("say", "end", "restart")
STALLED = 124
"""The launcher's exit code where a stall ended the run: that of timeout(1)."""


class Verdict(NamedTuple):
    """Why the run is to be ended."""

    story: str
    exit_code: int
    final: bool = False  # is there to be no restart?


def check_options(seconds: float | None, action: str, max_restarts: int) -> None:
    """Raises LaunchError for a --stall-timeout or --stall-action that cannot work."""
    if seconds is not None and seconds <= 0:
        raise LaunchError(
            f"--stall-timeout {seconds:g}: give seconds, above 0, as 300. Left out, it follows the time of a batch."
        )
    if action not in ACTIONS:
        raise LaunchError(f"--stall-action {action}: there is no such action. Give one of {', '.join(ACTIONS)}.")
    if action == "restart" and max_restarts < 1:
        raise LaunchError("--stall-action restart: no restart is allowed. Give --max-restarts N too, or `end`.")


@dataclass
class _Sight:
    """Successive looks at a rank that has not moved.

    Attributes:
        first, last: its stack then and now; None where it did not answer.
        since: when the first was.
        state: what the kernel says of it now; before: at the look before.
        beats: how many batches it had taken.
        cores: the processor time that it used since the look before, for each second.
        missed: did it not answer this time, and `last` is what it answered the time before?
    """

    first: StackSample | None
    since: float
    last: StackSample | None
    state: ProcessState
    before: ProcessState
    beats: int
    cores: float = 0.0
    missed: bool = False

    def waiting(self, now: float) -> bool:
        """Does the rank wait for others?"""
        if self.first is None or self.last is None or self.state.stopped:
            return False
        return is_waiting(self.first, self.last, now - self.since)

    def waits_idly(self, now: float) -> bool:
        """Does it wait in a collective or a backward, without a part of its own in what is sent meanwhile?"""
        if not self.waiting(now) or self.last is None or self.last.works_beside:
            return False
        if not (in_collective(self.last) or may_wait(self.last)):
            return False
        return self.cores < _IDLE and self.state.code != process_state.IN_KERNEL

    def as_before(self, other: _Sight) -> bool:
        """Has nothing moved between the two looks?"""
        if self.last is not None and self.last.moves:
            return False
        frames = [None if sight.last is None else sight.last.frames for sight in (self, other)]
        return frames[0] == frames[1] and self.beats == other.beats and self.state.stopped == other.state.stopped


class _Pace:
    """How long a batch usually takes, by the count of one rank's batches."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def add(self, beats: int, now: float) -> None:
        if beats and (self._last is None or beats != self._last[0]):
            self._first = self._first or (beats, now)
            self._last = (beats, now)

    @property
    def seconds(self) -> float:
        """0 where it is not known yet."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


class Stalls:
    """Watches the ranks of one machine while they run.

    Args:
        error_files: of each rank of this machine.
        alone: is there no other rank to wait for?
        several: do ranks of other machines take part?
        on_cpus: is it certain that the run uses no GPU?
        seconds: the limit; None: by the usual time of a batch.
        action: what is done after it is said: one of ACTIONS.
    """

    def __init__(
        self,
        error_files: Mapping[int, str],
        alone: bool,
        *,
        several: bool = False,
        on_cpus: bool = False,
        seconds: float | None = None,
        action: str = "say",
    ) -> None:
        self._error_files, self._several, self._on_cpus = error_files, several, on_cpus
        self._seconds, self.action = seconds, action
        self._stacks = not alone or seconds is not None  # a rank alone is asked nothing, unless the user set a limit
        self._polled = time.monotonic()
        self._looked_for = 0.0  # seconds between the last two looks
        self._seen: dict[int, _Sight] = {}
        self._paces: dict[int, _Pace] = {rank: _Pace() for rank in error_files}
        self._said = 0.0  # after how long without progress the last message was; 0: there was progress since
        early = float("inf") if seconds is None else seconds / 2
        self._left_seconds, self._stuck_seconds = min(LEFT_SECONDS, early), min(STUCK_SECONDS, early)
        self._left_at: float | None = None  # when the first rank was seen to have ended
        self._left_said = False

    @property
    def limit(self) -> float:
        """After how many seconds without progress it is said."""
        if self._seconds is not None:
            return self._seconds
        return max(STALL_SECONDS, USUAL_TIMES * max((pace.seconds for pace in self._paces.values()), default=0.0))

    def poll(self, pids: Mapping[int, int], left: Sequence[int] = ()) -> Verdict | None:
        """Print a message if one is due.

        Args:
            pids: the process of each rank of this machine that still runs.
            left: the ranks, of any machine, that have ended without an error.

        Returns why the run is to be ended, if it is.
        """
        now = time.monotonic()
        if not self._error_files or not pids or now - self._polled < self._interval(now):
            return None
        self._looked_for, self._polled = now - self._polled, now
        if self._looked_for > _SUSPENDED_SECONDS:
            self._seen = {}
        self._seen = self._look(pids, now)
        return self._wait_for_the_left(left, now) or self._stalled(pids, left, now)

    def _wait_for_the_left(self, left: Sequence[int], now: float) -> Verdict | None:
        """Say that ranks have ended, once. Do others wait for them?"""
        if not left:
            return None
        self._left_at = self._left_at or now
        if now - self._left_at < self._left_seconds:
            return None
        if not self._left_said:
            self._left_said = True
            running = f"{name_ranks(self._seen)} still run{'s' if len(self._seen) == 1 else ''}"
            say(f"paceline: {self._exits(left, f'{self._left_seconds:.0f} s ago')}; {running}.\n")
        for rank, sight in self._seen.items():
            known_since = max(sight.since, self._left_at + self._left_seconds)
            if now - known_since >= self._stuck_seconds and sight.waiting(now):
                story = (
                    f"{self._exits(left)}, and rank {rank} has waited since then at {sight.last}. "
                    "Do all ranks take the same number of steps, and make the same calls?"
                )
                return Verdict(story, 1)
        return None

    def _exits(self, left: Sequence[int], how: str = "early") -> str:
        """Which ranks ended, without an error, and where in the script; "" where none has."""
        places = {rank: told(path, LEFT) or "" for rank, path in self._error_files.items()}
        return exits_in_words(left, places, how) if left else ""

    def _stalled(self, pids: Mapping[int, int], left: Sequence[int], now: float) -> Verdict | None:
        still = {rank: now - sight.since for rank, sight in self._seen.items()}
        limit = min(self.limit, DEADLOCK_SECONDS) if self._deadlocked(now) else self.limit
        late = [rank for rank, seconds in still.items() if seconds >= limit]
        waiting = [rank for rank in late if self._seen[rank].waiting(now)]
        stopped = [rank for rank in late if self._seen[rank].state.stopped]
        known = all(sight.last is not None or sight.state.stopped for sight in self._seen.values())
        patience = self.limit * (1 if self._seconds is not None else 2)
        none_moves = self._stacks and known and min(still.values(), default=0.0) >= patience
        if not waiting and not stopped and not none_moves:
            self._tell_stopped(pids, still, now, left)
            return None
        longest = max(still[rank] for rank in waiting or stopped or still)
        if self.action != "say":
            elsewhere = self._several and len(waiting) == len(pids)
            if longest < limit + (_OTHERS_FIRST_SECONDS if elsewhere else 0.0):
                return None
            story = self._story(pids, waiting, longest, now, left, self._calls(pids))
            return Verdict(story, STALLED, final=self.action == "end")
        if self._said == 0.0 or longest >= 2 * self._said:
            self._said = longest
            calls = self._calls(pids)
            story = self._story(pids, waiting, longest, now, left, calls)
            if waiting and in_vain(calls, self._seen if self._all_idle(now) else ()):
                return Verdict(f"{story}\n  By these numbers they wait in vain: the run is ended.", STALLED)
            say(f"paceline: {story}\n")
        return None

    def _tell_stopped(
        self, pids: Mapping[int, int], still: Mapping[int, float], now: float, left: Sequence[int]
    ) -> None:
        """Of ranks that a signal has stopped it is certain that they do not move: it is said long before the limit."""
        stopped = [seconds for rank, seconds in still.items() if self._seen[rank].state.stopped]
        longest = max(stopped, default=0.0)
        if longest < STOPPED_SECONDS:
            self._said = 0.0
        elif self._said == 0.0 or longest >= 2 * self._said:
            self._said = longest
            say(f"paceline: {self._story(pids, [], longest, now, left, {})}\n")

    def _deadlocked(self, now: float) -> bool:
        """Do all ranks of the run wait for each other? Not where the user has set the limit."""
        return self._seconds is None and self._all_idle(now)

    def _all_idle(self, now: float) -> bool:
        """Do all ranks of the run wait, and none does anything meanwhile?

        Where there are GPUs nobody knows: all may wait, without a core, for what was queued there.
        """
        if not self._on_cpus or self._several:
            return False
        if len(self._seen) != len(self._error_files):
            return False
        return len(self._seen) > 1 and all(sight.waits_idly(now) for sight in self._seen.values())

    def _interval(self, now: float) -> float:
        """Seconds between two looks: few where the limit is near, so that it is said soon after."""
        if self._left_at is not None:
            return min(POLL_SECONDS, _LEFT_POLL_SECONDS, self._stuck_seconds / 4)
        near = any(
            now - sight.since > self.limit / 2 for sight in self._seen.values() if sight.last or sight.state.stopped
        )
        return min(_SOON_SECONDS, self.limit / 20) if near else min(POLL_SECONDS, self.limit / 10)

    def _look(self, pids: Mapping[int, int], now: float) -> dict[int, _Sight]:
        states = {rank: read_state(pid) for rank, pid in pids.items()}
        stands = sample_stacks(self._error_files, pids) if self._stacks else {}
        seen = {}
        for rank in pids:
            beats = read_beat(self._error_files[rank] + BEAT)
            self._paces[rank].add(beats, now)
            stand, state, before = stands.get(rank), states[rank], self._seen.get(rank)
            if before is not None and self._only_late(before, stand, state, beats):  # a busy machine
                seen[rank] = replace(before, state=state, before=before.state, missed=True)
                continue
            sight = _Sight(stand, now, stand, state, before.state if before else state, beats)
            if before is not None:
                if stand is not None and before.last is not None and self._looked_for > 0:
                    sight.cores = (stand.cpu_seconds - before.last.cpu_seconds) / self._looked_for
                if sight.as_before(before):
                    sight.first, sight.since = before.first, before.since
            seen[rank] = sight
        return seen

    @staticmethod
    def _only_late(before: _Sight, stand: StackSample | None, state: ProcessState, beats: int) -> bool:
        """Is its answer missing for the first time, and nothing else known of the rank? Then it counts as the same."""
        answers = stand is not None or before.last is None or before.missed
        return not answers and not state.stopped and not before.state.stopped and before.beats == beats

    # ------------------------------------------------------------ saying it

    def _story(
        self,
        pids: Mapping[int, int],
        waiting: list[int],
        seconds: float,
        now: float,
        left: Sequence[int],
        calls: Mapping[int, list[GroupCalls]],
    ) -> str:
        """Who waits, who has not come, and what keeps each. No newline at the end."""
        away = [rank for rank in self._seen if rank not in waiting]
        stopped = [rank for rank in away if self._seen[rank].state.stopped]
        if waiting:
            head = f"{name_ranks(waiting)} {_has(waiting)} waited for other ranks for {seconds:.0f} s."
        elif stopped:
            head = f"{name_ranks(stopped)} {_has(stopped)} been stopped for {seconds:.0f} s."
        else:
            head = f"no rank of this machine has moved for {seconds:.0f} s."
        lines, explained = [head], bool(stopped)
        for rank, sight in sorted(self._seen.items()):
            lines.append(f"  rank {rank} {self._where(pids[rank], sight, now)}")
            if rank in away:
                loaders = self._loader_lines(rank, pids[rank], sight)
                explained = explained or bool(loaders) or sight.state.code == process_state.IN_KERNEL
                lines += loaders
        lines += [f"  {self._exits(left)}."] if left else []
        if self._deadlocked(now):
            lines.append("  All ranks wait, each for others.")
        if away and waiting:
            lines.append(f"  {name_ranks(away)} {_has(away)} not come to it.")
        lines += [f"  {line}" for line in calls_in_words(calls)]
        if waiting and not explained and len({str(sight.last) for sight in self._seen.values()}) > 1:
            lines.append(
                "  Every rank must make the same calls in the same order: is one of these made on some ranks only (if "
                "run.main: run.save(...)), or has one rank more steps than another? If a rank is only slow, wait."
            )
        return "\n".join(lines)

    def _where(self, pid: int, sight: _Sight, now: float) -> str:
        """Such as "waits at train.py, line 14, in backward()", or what the kernel says of a rank that cannot tell."""
        at = "" if sight.last is None else f"at {sight.last}"
        if sight.waiting(now):
            return f"waits {at}"
        kept = process_state.describe(pid, sight.state, sight.before, self._looked_for)
        if kept:
            return f"{kept}, {at}" if at else kept
        if not at:
            return f"does not say where it is; `py-spy dump --pid {pid}` may"
        runs = process_state.RUNNING in (sight.state.code, sight.before.code)  # or waits for a core
        return f"computes {at}" if runs or sight.cores > _BUSY else f"is {at}"

    def _calls(self, pids: Mapping[int, int]) -> dict[int, list[GroupCalls]]:
        """The collective calls of each rank that answers. One that has not told its stack is not asked."""
        able = [rank for rank, sight in self._seen.items() if sight.last is not None and not sight.state.stopped]
        asked = {pids[rank]: self._error_files[rank] for rank in able}
        found = stack_thread.ask_calls(asked, _CALLS_SECONDS)
        return {rank: found[pid] for rank, pid in pids.items() if pid in found}

    def _loader_lines(self, rank: int, pid: int, sight: _Sight) -> list[str]:
        """A line for each process of its DataLoader that keeps the rank waiting."""
        if sight.last is None or not sight.last.loads:
            return []
        lines = []
        for child, state, stand in sample_loader_workers(self._error_files[rank], pid):
            kept = process_state.describe(child, state)
            at = "" if stand is None else f"at {stand}"
            what = f"{kept}, {at}" if kept and at else kept or f"is {at}"
            lines.append(f"    its DataLoader worker, process {child}, {what}")
        return lines


def in_vain(calls: Mapping[int, list[GroupCalls]], idle: Collection[int]) -> bool:
    """Is it proved by the numbers of their calls that ranks wait for ever?

    It is where two ranks have made different calls of one number in one group. And where all ranks of the run wait, if
    one is in a call that another has not made: it would have to come, and waits itself.

    Args:
        calls: of each rank that has answered.
        idle: the ranks of the run, where all of them wait; empty where one may still do something.
    """
    for rank, groups in calls.items():
        for one in groups:
            others = {other: _of_group(calls[other], one) for other in calls if other != rank}
            members = {rank: one, **{other: found for other, found in others.items() if found is not None}}
            if _mismatch(members):
                return True
            call = one.under_way
            if call is None or call.message or len(idle) < 2 or set(idle) != set(calls):
                continue
            made = {other: _newest(found) >= call.number for other, found in others.items()}
            takes_part = [other for other, found in others.items() if found is not None or one.of_all_ranks]
            if not any(made.values()) or not all(made[other] for other in takes_part):
                return True
    return False


def _of_group(groups: Iterable[GroupCalls], one: GroupCalls) -> GroupCalls | None:
    return next((other for other in groups if other.group == one.group), None)


def _newest(one: GroupCalls | None) -> int:
    """The number of the newest collective call that was made, queued ones too; 0 where there is none."""
    if one is None:
        return 0
    queued = one.under_way.number + one.queued - 1 if one.under_way is not None else 0
    return max((queued, *(call.number for call in one.made if not call.message)))


def calls_in_words(calls: Mapping[int, list[GroupCalls]]) -> list[str]:
    """A sentence for each group in which a call is under way: who is in which call, and who has not come to it.

    calls: of each rank that has answered.
    """
    lines = []
    titles = {one.group: one.title for groups in calls.values() for one in groups if one.under_way is not None}
    for group, title in titles.items():
        members = {rank: one for rank, groups in calls.items() for one in groups if one.group == group}
        said: dict[str, list[int]] = {}
        for rank, one in sorted(members.items()):
            said.setdefault(_stands(one), []).append(rank)
        parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in said.items()]
        lines.append(f"In group {title}: {'; '.join(parts)}.")
        lines += _mismatch(members)
    return lines


def _stands(one: GroupCalls) -> str:
    """Such as "in call 7, all_reduce of float32 [1024]"."""
    if one.under_way is not None:
        behind = f", with {one.queued - 1} more behind it" if one.queued > 1 else ""
        return f"in {one.under_way.numbered}{behind}"
    return f"in none, after {one.ended[-1].numbered}" if one.ended else "in none"


def _mismatch(members: Mapping[int, GroupCalls]) -> list[str]:
    """What some rank waits in and another has called by the same number cannot be the same call: a sentence, if so."""
    made = [(rank, call) for rank, one in sorted(members.items()) for call in one.made]
    for waited in (one.under_way for one in members.values() if one.under_way is not None):
        same = [(rank, call) for rank, call in made if _same_number(call, waited)]
        if not all(call.matches(waited) for _, call in same):
            ranks: dict[str, list[int]] = {}
            for rank, call in same:
                ranks.setdefault(str(call), []).append(rank)
            told = ", ".join(f"{call} on {name_ranks(who)}" for call, who in ranks.items())
            return [f"  Call {waited.number} is not the same on all ranks: {told}."]
    return []


def _same_number(call: Call, other: Call) -> bool:
    return (call.number, call.message) == (other.number, other.message)


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
