"""What starts again after what: random histories of several machines. The tests' own ledger counts every start."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.launcher.restart_policy import Restarts

# For a change of the policy: 100,000, in ten to thirty minutes.
HISTORIES = int(os.environ.get("RESTART_HISTORIES", "300"))


@dataclass
class Machine:
    restarts: Restarts
    failed: bool = False  # has a failure ended its ranks since the machines met?


class Histories(RuleBasedStateMachine):
    """Machines run, fail, lose the keeper of their rendezvous, are joined by others and left by them.

    The ledger has what truly started: `spent` restarts of the whole run, by all machines together.
    """

    @initialize(
        most=st.integers(0, 4),
        sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
    )
    def begin(self, most: int, sizes: list[tuple[int, int]]) -> None:
        self.most, self.spent, self.starts, self.running, self.over = most, 0, 0, False, False
        self.machines = [Machine(Restarts(most, low, low + more, low + more)) for low, more in sizes]
        self.meet()

    def meet(self) -> None:
        known = [machine.restarts for machine in self.machines]
        starts, used = max(one.starts for one in known), max(one.used for one in known)
        for machine in self.machines:
            machine.restarts, machine.failed = machine.restarts.met(starts, used), False
        self.starts += 1
        self.running = True

    def end(self) -> None:
        self.running, self.over = False, True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), moved=st.booleans())
    def fail(self, data: Any, moved: bool) -> None:
        """Ranks of one machine or more die; all machines hear of it, and each decides by itself."""
        decisions, lacking = [], False
        for machine in self.machines:
            before = machine.restarts
            died = data.draw(st.integers(0, before.ranks))
            room = data.draw(st.none() | st.integers(0, 8))
            after = before.after_failure(died, moved, room)
            short = before.fewest < before.full and room is not None and room < before.fewest
            lacking = lacking or (short and self.spent < self.most)
            assert (after is not None) == (self.spent < self.most and not short), "machines decide differently"
            if after is not None:
                assert before.fewest <= after.ranks <= before.full
                assert room is None or before.fewest == before.full or after.ranks <= room
                if room is None and not moved and 0 < died < before.ranks:
                    assert after.ranks == max(before.fewest, before.ranks - died)
                if room is None and moved:
                    assert after.ranks == before.full
            decisions.append(after)
        if any(after is None for after in decisions):  # it ends by itself; those that would go on wait for it in vain
            assert lacking or self.spent == self.most
            self.end()
            return
        self.spent += 1
        for machine, after in zip(self.machines, decisions):
            assert after is not None
            machine.restarts, machine.failed = after, True
        self.running = False

    @precondition(lambda self: not self.running and not self.over)
    @rule()
    def meet_again(self) -> None:
        self.meet()

    @precondition(lambda self: not self.over)
    @rule()
    def lose_the_keeper(self) -> None:
        """While the ranks run, or after a failure, before the machines have met again."""
        after = [machine.restarts.after_loss_of_host(machine.failed) for machine in self.machines]
        if self.running and any(one is None for one in after):  # nobody can tell the others any more
            assert self.spent == self.most
            self.end()
            return
        self.spent += self.running
        for machine, restarts in zip(self.machines, after):
            assert restarts is not None, "the failure has taken up the restart"
            machine.restarts, machine.failed = restarts, True
        self.running = False

    @precondition(lambda self: not self.over and len(self.machines) < 4)
    @rule(low=st.integers(1, 4), more=st.integers(0, 4))
    def another_machine_comes(self, low: int, more: int) -> None:
        """All ranks start again, and it takes up no restart. While the others are between two starts, it joins them."""
        self.machines.append(Machine(Restarts(self.most, low, low + more, low + more), failed=not self.running))
        if self.running:
            self.meet()

    @precondition(lambda self: self.over)
    @rule()
    def nothing_more(self) -> None:
        """A history may be longer than its run."""

    @precondition(lambda self: self.running)
    @invariant()
    def all_that_run_know_the_same_starts(self) -> None:
        assert {machine.restarts.starts for machine in self.machines} == {self.starts}

    @invariant()
    def no_more_restarts_than_asked_for(self) -> None:
        assert getattr(self, "spent", 0) <= getattr(self, "most", 0)
        for machine in getattr(self, "machines", []):
            assert 0 <= machine.restarts.used <= self.most
            assert machine.restarts.fewest <= machine.restarts.ranks <= machine.restarts.full


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=HISTORIES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = pytest.mark.timeout(7200 if HISTORIES > 1000 else 120)(TestHistories)


@pytest.mark.parametrize(
    ("died", "moved", "room", "ranks"),
    [
        (1, False, None, 3),  # came to nothing: without the one that died
        (2, False, None, 2),
        (3, False, None, 2),  # no fewer than MIN
        (4, False, None, 4),  # the script
        (0, False, None, 4),  # another machine's
        (1, True, None, 4),  # it had got under way: it is replaced
        (1, True, 3, 3),  # a device has gone
        (1, True, 1, None),
    ],
)
def test_how_many_processes_a_machine_starts_with_next(died: int, moved: bool, room: int | None, ranks: int) -> None:
    after = Restarts(3, 2, 4, 4).after_failure(died, moved, room)
    assert (after and after.ranks) == ranks
    alike = Restarts(3, 4, 4, 4).after_failure(died, moved, room)
    assert alike is not None
    assert alike.ranks == 4, "a single number is kept; the rank itself says what it lacks"


def test_after_a_start_with_fewer_that_got_under_way_the_next_has_all() -> None:
    fewer = Restarts(3, 2, 4, 4).after_failure(1, False, None)
    assert fewer is not None
    again = fewer.after_failure(1, True, None)
    assert again is not None
    assert (fewer.ranks, again.ranks, again.left) == (3, 4, 1)
    assert replace(again, used=3).after_failure(1, True, None) is None
