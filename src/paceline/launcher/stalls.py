"""Detect stalls, and report them: which rank waits, where, in which call, which rank it waits for, and why.

A rank that makes a collective call alone (`if run.main: run.save(...)`), or takes one step more than the others, waits
until the process group's timeout of 30 minutes. So do ranks that wait for a stopped, looping or disk-bound rank. But a
rank may also simply be busy for a long time. So the launcher ends no rank unless the user asked for it
(--stall-action), or the ranks provably wait forever (`in_vain`).

1. Every few seconds, read the state of all ranks of this machine in /proc, and sample their stacks (stacks.py).
2. A stall is a state that lasts for the limit (--stall-timeout): a rank waits (its stack is in communication and does
   not change), a rank is stopped, or no rank moves. A rank moves if it starts another batch, which it counts in a file
   (step/heartbeat.py), or if it runs Python code that does not wait.
3. Report where all ranks are, and their collective calls from torch's flight recorder, because the stack does not show
   work that is queued on a GPU. While the stall lasts, repeat the report after twice the time, four times the time, and
   so on.

A rank may rightly end with exit code 0 while others continue: for example, rank 0 exports the model after the other
ranks have finished. The launcher reports this after LEFT_SECONDS. If another rank then waits in communication for
STUCK_SECONDS, it waits forever, and the launcher ends the run.

The default limit is STALL_SECONDS, or USUAL_TIMES the run's usual batch time if that is longer. On CPUs, it is
DEADLOCK_SECONDS if all ranks of the run wait in collectives or in a backward, so that their calls cannot match, and
none uses a core or has a busy thread. A stopped rank is reported after STOPPED_SECONDS.
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
from paceline.world import BEAT, LEFT, read_beat, read_message

STALL_SECONDS = 60.0
USUAL_TIMES = 20
DEADLOCK_SECONDS = 10.0
STOPPED_SECONDS = 5.0
POLL_SECONDS = 4.0  # between two samples, at most
_SOON_SECONDS = 1.0  # between two samples, when the limit is near
LEFT_SECONDS = 10.0  # between the end of the first rank and the report
STUCK_SECONDS = 30.0
_LEFT_POLL_SECONDS = 2.0  # between two samples after a rank has ended
_OTHERS_FIRST_SECONDS = 4.0  # if all ranks here wait: time for the machine with the late rank to end the run itself
_CALLS_SECONDS = 2.0  # for the ranks to report their collective calls, which takes them about 0.1 s
_SUSPENDED_SECONDS = 30.0  # without a sample: the launcher itself was stopped, so older samples are worthless
_BUSY = 0.5  # cores; a process that uses more is computing
_IDLE = 0.1  # cores; a process that uses less is waiting, and moves no data

ACTIONS = ("say", "end", "restart")
STALLED = 124
"""The launcher's exit code if a stall ended the run; timeout(1) uses the same code."""


class Verdict(NamedTuple):
    """Why the run must end."""

    report: str
    exit_code: int
    final: bool = False  # whether a restart is ruled out


def check_options(seconds: float | None, action: str, max_restarts: int) -> None:
    """Raise LaunchError for an invalid --stall-timeout or --stall-action."""
    if seconds is not None and seconds <= 0:
        raise LaunchError(
            f"--stall-timeout {seconds:g}: give seconds above 0, such as 300. The default depends on the batch time."
        )
    if action not in ACTIONS:
        raise LaunchError(f"--stall-action {action}: unknown action. Give one of {', '.join(ACTIONS)}.")
    if action == "restart" and max_restarts < 1:
        raise LaunchError("--stall-action restart: no restart is allowed. Give --max-restarts N too, or use `end`.")


@dataclass
class _Sight:
    """Successive samples of a rank that has not moved.

    Attributes:
        first, last: the first and the latest stack. None if the rank did not answer.
        since: time of the first sample.
        state: the kernel's state of the process now.
        before: the kernel's state at the previous sample.
        beats: number of started batches.
        cores: processor time per second since the previous sample.
        missed: whether the rank did not answer this time, so that `last` is its previous answer.
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
        """Return whether the rank waits for others."""
        if self.first is None or self.last is None or self.state.stopped:
            return False
        return is_waiting(self.first, self.last, now - self.since)

    def waits_idly(self, now: float) -> bool:
        """Return whether the rank waits in a collective or a backward, without sending or computing meanwhile."""
        if not self.waiting(now) or self.last is None or self.last.works_beside:
            return False
        if not (in_collective(self.last) or may_wait(self.last)):
            return False
        return self.cores < _IDLE and self.state.code != process_state.IN_KERNEL

    def as_before(self, other: _Sight) -> bool:
        """Return whether the rank has not moved between the two samples."""
        if self.last is not None and self.last.moves:
            return False
        frames = [None if sight.last is None else sight.last.frames for sight in (self, other)]
        return frames[0] == frames[1] and self.beats == other.beats and self.state.stopped == other.state.stopped


class _Pace:
    """The usual time of a batch, from one rank's count of batches."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def add(self, beats: int, now: float) -> None:
        if beats and (self._last is None or beats != self._last[0]):
            self._first = self._first or (beats, now)
            self._last = (beats, now)

    @property
    def seconds(self) -> float:
        """Seconds per batch; 0 if not known yet."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


class Stalls:
    """Watches the ranks of one machine while they run.

    Args:
        error_files: rank -> error file, for each rank of this machine.
        alone: whether the run has only one rank.
        several: whether the run has ranks on other machines.
        on_cpus: whether the run certainly uses no GPU.
        seconds: the limit. None: based on the usual time of a batch.
        action: the action after the report, from ACTIONS.
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
        self._stacks = not alone or seconds is not None  # a single rank is not sampled unless the user set a limit
        self._polled = time.monotonic()
        self._looked_for = 0.0  # seconds between the last two samples
        self._seen: dict[int, _Sight] = {}
        self._paces: dict[int, _Pace] = {rank: _Pace() for rank in error_files}
        self._said = 0.0  # seconds without progress at the last report; 0: no stall is reported
        early = float("inf") if seconds is None else seconds / 2
        self._left_seconds, self._stuck_seconds = min(LEFT_SECONDS, early), min(STUCK_SECONDS, early)
        self._left_at: float | None = None  # when the launcher noticed that the first rank had ended
        self._left_said = False

    @property
    def limit(self) -> float:
        """Seconds without progress before a stall is reported."""
        if self._seconds is not None:
            return self._seconds
        return max(STALL_SECONDS, USUAL_TIMES * max((pace.seconds for pace in self._paces.values()), default=0.0))

    def poll(self, pids: Mapping[int, int], left: Sequence[int] = ()) -> Verdict | None:
        """Sample the ranks, and print a report if one is due.

        Args:
            pids: rank -> process id, for the ranks of this machine that still run.
            left: the ranks of any machine that have ended without an error.

        Returns:
            Why the run must end, or None.
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
        """Report once that ranks have ended. Return a verdict if other ranks wait for them."""
        if not left:
            return None
        self._left_at = self._left_at or now
        if now - self._left_at < self._left_seconds:
            return None
        if not self._left_said:
            self._left_said = True
            running = f"{name_ranks(self._seen)} {'is' if len(self._seen) == 1 else 'are'} still running"
            say(f"paceline: {self._exits(left, f'{self._left_seconds:.0f} s ago')}; {running}.\n")
        for rank, sight in self._seen.items():
            known_since = max(sight.since, self._left_at + self._left_seconds)
            if now - known_since >= self._stuck_seconds and sight.waiting(now):
                text = (
                    f"{self._exits(left)}, and rank {rank} has waited since then at {sight.last}. "
                    "Do all ranks take the same number of steps, and make the same calls?"
                )
                return Verdict(text, 1)
        return None

    def _exits(self, left: Sequence[int], how: str = "early") -> str:
        """Describe which ranks ended without an error, and where in the script; "" if none did."""
        places = {rank: read_message(path, LEFT) or "" for rank, path in self._error_files.items()}
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
            self._report_stopped(pids, still, now, left)
            return None
        longest = max(still[rank] for rank in waiting or stopped or still)
        if self.action != "say":
            elsewhere = self._several and len(waiting) == len(pids)
            if longest < limit + (_OTHERS_FIRST_SECONDS if elsewhere else 0.0):
                return None
            text = self._report(pids, waiting, longest, now, left, self._calls(pids))
            return Verdict(text, STALLED, final=self.action == "end")
        if self._said == 0.0 or longest >= 2 * self._said:
            self._said = longest
            calls = self._calls(pids)
            text = self._report(pids, waiting, longest, now, left, calls)
            if waiting and in_vain(calls, self._seen if self._all_idle(now) else ()):
                return Verdict(f"{text}\n  These call numbers can never match, so the run ends.", STALLED)
            say(f"paceline: {text}\n")
        return None

    def _report_stopped(
        self, pids: Mapping[int, int], still: Mapping[int, float], now: float, left: Sequence[int]
    ) -> None:
        """Report stopped ranks long before the limit, because they certainly do not move."""
        stopped = [seconds for rank, seconds in still.items() if self._seen[rank].state.stopped]
        longest = max(stopped, default=0.0)
        if longest < STOPPED_SECONDS:
            self._said = 0.0
        elif self._said == 0.0 or longest >= 2 * self._said:
            self._said = longest
            say(f"paceline: {self._report(pids, [], longest, now, left, {})}\n")

    def _deadlocked(self, now: float) -> bool:
        """Return whether all ranks of the run wait for each other. Always False if the user set the limit."""
        return self._seconds is None and self._all_idle(now)

    def _all_idle(self, now: float) -> bool:
        """Return whether all ranks of the run are known to wait idly.

        With GPUs this is unknown: all ranks may wait, without using a core, for work that is queued on the GPUs.
        """
        if not self._on_cpus or self._several:
            return False
        if len(self._seen) != len(self._error_files):
            return False
        return len(self._seen) > 1 and all(sight.waits_idly(now) for sight in self._seen.values())

    def _interval(self, now: float) -> float:
        """Return the seconds until the next sample: fewer when the limit is near, so that the report is prompt."""
        if self._left_at is not None:
            return min(POLL_SECONDS, _LEFT_POLL_SECONDS, self._stuck_seconds / 4)
        near = any(
            now - sight.since > self.limit / 2 for sight in self._seen.values() if sight.last or sight.state.stopped
        )
        return min(_SOON_SECONDS, self.limit / 20) if near else min(POLL_SECONDS, self.limit / 10)

    def _look(self, pids: Mapping[int, int], now: float) -> dict[int, _Sight]:
        states = {rank: read_state(pid) for rank, pid in pids.items()}
        samples = sample_stacks(self._error_files, pids) if self._stacks else {}
        seen = {}
        for rank in pids:
            beats = read_beat(self._error_files[rank] + BEAT)
            self._paces[rank].add(beats, now)
            sample, state, before = samples.get(rank), states[rank], self._seen.get(rank)
            if before is not None and self._only_late(before, sample, state, beats):  # a busy machine
                seen[rank] = replace(before, state=state, before=before.state, missed=True)
                continue
            sight = _Sight(sample, now, sample, state, before.state if before else state, beats)
            if before is not None:
                if sample is not None and before.last is not None and self._looked_for > 0:
                    sight.cores = (sample.cpu_seconds - before.last.cpu_seconds) / self._looked_for
                if sight.as_before(before):
                    sight.first, sight.since = before.first, before.since
            seen[rank] = sight
        return seen

    @staticmethod
    def _only_late(before: _Sight, sample: StackSample | None, state: ProcessState, beats: int) -> bool:
        """Return whether a rank missed its first answer, with no other change. It then counts as unchanged."""
        answers = sample is not None or before.last is None or before.missed
        return not answers and not state.stopped and not before.state.stopped and before.beats == beats

    # ------------------------------------------------------------ the report

    def _report(
        self,
        pids: Mapping[int, int],
        waiting: list[int],
        seconds: float,
        now: float,
        left: Sequence[int],
        calls: Mapping[int, list[GroupCalls]],
    ) -> str:
        """Return the report: which ranks wait, which have not arrived, and why. It ends without a newline."""
        away = [rank for rank in self._seen if rank not in waiting]
        stopped = [rank for rank in away if self._seen[rank].state.stopped]
        if waiting:
            head = f"{name_ranks(waiting)} {_has(waiting)} waited for other ranks for {seconds:.0f} s."
        elif stopped:
            head = f"{name_ranks(stopped)} {_has(stopped)} been stopped for {seconds:.0f} s."
        else:
            head = f"no rank on this machine has made progress for {seconds:.0f} s."
        lines, explained = [head], bool(stopped)
        for rank, sight in sorted(self._seen.items()):
            lines.append(f"  rank {rank} {self._where(pids[rank], sight, now)}")
            if rank in away:
                loaders = self._loader_lines(rank, pids[rank], sight)
                explained = explained or bool(loaders) or sight.state.code == process_state.IN_KERNEL
                lines += loaders
        lines += [f"  {self._exits(left)}."] if left else []
        if self._deadlocked(now):
            lines.append("  All ranks wait for each other.")
        if away and waiting:
            lines.append(f"  {name_ranks(away)} {_has(away)} not reached that call.")
        lines += [f"  {line}" for line in calls_in_words(calls)]
        if waiting and not explained and len({str(sight.last) for sight in self._seen.values()}) > 1:
            lines.append(
                "  Every rank must make the same calls in the same order. Do only some ranks make one of these calls "
                "(if run.main: run.save(...)), or does one rank take more steps? If a rank is only slow, wait."
            )
        return "\n".join(lines)

    def _where(self, pid: int, sight: _Sight, now: float) -> str:
        """Describe a rank, such as "waits at train.py, line 14, in backward()", or its state in the kernel."""
        at = "" if sight.last is None else f"at {sight.last}"
        if sight.waiting(now):
            return f"waits {at}"
        kept = process_state.describe(pid, sight.state, sight.before, self._looked_for)
        if kept:
            return f"{kept}, {at}" if at else kept
        if not at:
            return f"does not answer; `py-spy dump --pid {pid}` may show where it is"
        runs = process_state.RUNNING in (sight.state.code, sight.before.code)  # or waits for a core
        return f"is computing {at}" if runs or sight.cores > _BUSY else f"is {at}"

    def _calls(self, pids: Mapping[int, int]) -> dict[int, list[GroupCalls]]:
        """Ask the ranks for their collective calls. Return rank -> calls, for each rank that answers.

        Ranks that did not report a stack are not asked.
        """
        able = [rank for rank, sight in self._seen.items() if sight.last is not None and not sight.state.stopped]
        asked = {pids[rank]: self._error_files[rank] for rank in able}
        found = stack_thread.ask_calls(asked, _CALLS_SECONDS)
        return {rank: found[pid] for rank, pid in pids.items() if pid in found}

    def _loader_lines(self, rank: int, pid: int, sight: _Sight) -> list[str]:
        """Return a line for each DataLoader worker that the rank waits for."""
        if sight.last is None or not sight.last.loads:
            return []
        lines = []
        for child, state, sample in sample_loader_workers(self._error_files[rank], pid):
            kept = process_state.describe(child, state)
            at = "" if sample is None else f"at {sample}"
            what = f"{kept}, {at}" if kept and at else kept or f"is {at}"
            lines.append(f"    its DataLoader worker, process {child}, {what}")
        return lines


def in_vain(calls: Mapping[int, list[GroupCalls]], idle: Collection[int]) -> bool:
    """Return whether the ranks' collective calls prove that ranks wait forever.

    There are two cases. Either ranks have made different calls with the same number in one group. Or all ranks of the
    run wait, and one of them is in a call that another rank has not made, and cannot make because it waits too.

    Args:
        calls: rank -> its calls, for each rank that has answered.
        idle: all ranks of the run if all of them wait idly, else empty.
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
    """Return the number of the newest collective call, including queued calls, or 0."""
    if one is None:
        return 0
    queued = one.under_way.number + one.queued - 1 if one.under_way is not None else 0
    return max((queued, *(call.number for call in one.made if not call.message)))


def calls_in_words(calls: Mapping[int, list[GroupCalls]]) -> list[str]:
    """Return a sentence for each group with a call in progress: the ranks in each call, and the ranks in none.

    Args:
        calls: rank -> its calls, for each rank that has answered.
    """
    lines = []
    titles = {one.group: one.title for groups in calls.values() for one in groups if one.under_way is not None}
    for group, title in titles.items():
        members = {rank: one for rank, groups in calls.items() for one in groups if one.group == group}
        said: dict[str, list[int]] = {}
        for rank, one in sorted(members.items()):
            said.setdefault(_position(one), []).append(rank)
        parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in said.items()]
        lines.append(f"In group {title}: {'; '.join(parts)}.")
        lines += _mismatch(members)
    return lines


def _position(one: GroupCalls) -> str:
    """Describe a rank's position in a group, such as "in call 7, all_reduce of float32 [1024]"."""
    if one.under_way is not None:
        behind = f", with {one.queued - 1} more queued" if one.queued > 1 else ""
        return f"in {one.under_way.numbered}{behind}"
    return f"in none, after {one.ended[-1].numbered}" if one.ended else "in none"


def _mismatch(members: Mapping[int, GroupCalls]) -> list[str]:
    """Return a sentence if ranks made different calls with the same number, and one of them waits in its call."""
    made = [(rank, call) for rank, one in sorted(members.items()) for call in one.made]
    for waited in (one.under_way for one in members.values() if one.under_way is not None):
        same = [(rank, call) for rank, call in made if _same_number(call, waited)]
        if not all(call.matches(waited) for _, call in same):
            ranks: dict[str, list[int]] = {}
            for rank, call in same:
                ranks.setdefault(str(call), []).append(rank)
            listed = ", ".join(f"{call} on {name_ranks(who)}" for call, who in ranks.items())
            return [f"  Call {waited.number} is not the same on all ranks: {listed}."]
    return []


def _same_number(call: Call, other: Call) -> bool:
    return (call.number, call.message) == (other.number, other.message)


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
