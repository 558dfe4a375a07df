"""torch's elastic agent, with processes of our own: it starts the workers, watches them and ends them together.

torch.distributed.elastic does the rendezvous, numbers the ranks and runs the loop that watches and restarts
(SimpleElasticAgent). Its abstract methods are implemented here, for four reasons that rule out its LocalElasticAgent:
that one waits 30 seconds for a worker that ignores SIGTERM, names the rank that was first seen to fail as the cause,
leaves the workers running when the launcher is killed, and tells the agents of other machines nothing.

A failure goes through these phases:

1. A worker is seen to have failed: a non-zero exit code, a signal, or an exception that it recorded more than
   LINGER_SECONDS ago without ending. Or another machine reports a failure, or a rank waits for one that has ended.
2. If only secondary failures have been reported, wait up to SETTLE_SECONDS for the root cause. Likewise for the first
   rank, whose words are shown, where the script refuses its arguments.
3. Tell the other machines.
4. End the other workers: SIGTERM, after 3 seconds SIGKILL, and whatever processes the workers had started.
5. Say the cause. Start all workers again, or end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.launcher import processes, report
from paceline.launcher.early_exits import EarlyExits, sample_stacks
from paceline.launcher.interrupts import Interrupts
from paceline.launcher.output import Output, say
from paceline.launcher.peers import Failure, Peers, RendezvousLost
from paceline.launcher.plan import Plan, available_cores, command_line, worker_environment
from paceline.launcher.rendezvous import workers_store
from paceline.launcher.stalls import Stalls
from paceline.torch_private.elastic import SimpleElasticAgent
from paceline.world import JOINED, MAY_DIE, ROLE, TICKET, TICKET_FILE, World

SETTLE_SECONDS = 1.0
LATE_SECONDS = 60.0  # for a rank that is to rejoin others, and finds that all have ended
LINGER_SECONDS = 10.0  # for the exit functions of a failed script, such as uploading a log


class Agent(SimpleElasticAgent):
    """The elastic agent of this machine.

    Args:
        spec: what torch's part needs to know.
        plan: what to run.
        output: where the ranks print.
        interrupts: whether Ctrl-C or SIGTERM came.
    """

    def __init__(self, spec: WorkerSpec, plan: Plan, output: Output, interrupts: Interrupts) -> None:
        super().__init__(spec)
        self.exit_code = 0  # the launcher's
        self.story = ""  # why the run failed, ending in a newline
        self.refused = False  # did all ranks refuse the script's arguments?
        self._plan, self._output, self._interrupts = plan, output, interrupts
        self._processes = processes.Processes([])
        self._ranks = range(0)  # of this machine
        self._endings: dict[int, report.Ending] = {}  # local rank -> how it was first seen to have ended
        self._commands: list[processes.Command] = []  # that the workers were started with
        self._rejoined: set[int] = set()  # local ranks that were started again alone, to rejoin the others
        self._too_late: set[int] = set()  # of these, those that found nobody and were ended
        self._starts = 0
        self._failed = False  # were the workers ended because of a failure?
        self._began = time.monotonic()
        self._early_exits, self._stalls = EarlyExits({}), Stalls({}, True)
        self._peers: Any = None
        self._workers_store: Any = None

    # ------------------------------------------------------------ starting

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._starts and self._failed:
            most = self._plan.max_restarts
            say(f"{self.story}paceline: restart {most - self._remaining_restarts} of {most}.\n")
        elif self._starts:
            say("paceline: machines have come; all ranks start again.\n")
        worker_group.store = self._store = None  # so that the former store stops listening
        self._interrupts.deferred = False  # nothing runs: end at once
        self._interrupts.check()
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node: Any = worker_group.group_rank  # numbers by now; torch's annotations say None
        nodes: Any = worker_group.group_world_size
        store: Any = worker_group.store
        first = worker_group.workers[0].global_rank
        self._ranks = range(first, first + self._plan.nproc)
        self._endings, self._rejoined, self._too_late, self._failed = {}, set(), set(), False
        self.exit_code, self.story = 0, ""
        if self._plan.nodes.backend == "static":  # the others give a new store, or a new prefix, to each round
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            store = PrefixStore(str(self._starts), store)
        self._peers = Peers(store, node, nodes, self._plan.nodes.endpoint, self._interrupts.check)
        starts, used = self._peers.agree(self._starts, self._plan.max_restarts - self._remaining_restarts)
        self._starts, self._remaining_restarts = starts + 1, self._plan.max_restarts - used
        if self._plan.nodes.several:
            if node == 0:
                self._workers_store = workers_store(self._plan.nodes, str(worker_group.master_addr))
            own = self._workers_store.port if node == 0 else None
            worker_group.master_port = self._peers.share_port(own)
        files = {rank: self._error_file(rank) for rank in self._ranks}
        self._early_exits = EarlyExits(files)
        self._stalls = Stalls(files, alone=len(files) == 1 and not self._plan.nodes.several)
        self._interrupts.deferred = True
        self._interrupts.check()
        self._commands = commands = [self._command(worker_group, worker, starts) for worker in worker_group.workers]
        try:
            self._processes = processes.start(commands)
        finally:
            for command in commands:
                if command.output is not None:
                    command.output.close()
        return dict(enumerate(self._processes.pids))

    def _command(self, group: WorkerGroup, worker: Any, starts: int) -> processes.Command:
        rendezvous = group.spec.rdzv_handler
        world = World(
            worker.global_rank,
            worker.world_size,
            worker.local_rank,
            group.spec.local_world_size,
            group.group_rank,  # type: ignore[arg-type]  # as above
            group.group_world_size,  # type: ignore[arg-type]
            "paceline",
            group.master_addr,
            group.master_port,
        )
        environ = worker_environment(
            self._plan,
            world,
            error_file=self._error_file(worker.global_rank),
            run_id=rendezvous.get_run_id(),
            launcher_pid=os.getpid(),
            cores=available_cores(),
            environ=os.environ,
            restarts=starts,
        )
        output = self._output.open(worker.global_rank, first=worker.local_rank == 0)
        return processes.Command(command_line(self._plan), environ, output)

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._output.private, f"error-{rank}-{self._starts}.json")

    # ------------------------------------------------------------ watching

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._interrupts.check()
        self._poll_workers()
        self._output.show()
        if any(ending.failed for ending in self._endings.values()):
            return self._fail(None, self._wait_for_cause())
        elsewhere = self._peers.poll()
        if elsewhere is not None:
            return self._fail(None, elsewhere)
        if len(self._endings) == self._plan.nproc:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ranks))
        problem = self._timed_out() or self._early_exits.poll([*self._exited(), *self._peers.exited], self._running())
        if problem is not None:
            return self._fail(problem, None)
        self._stalls.poll(self._running())
        return RunResult(WorkerState.HEALTHY)

    def _fail(self, problem: str | None, elsewhere: Failure | None) -> RunResult:
        """End this machine's workers and say why: their own failure, or `problem`, or a failure `elsewhere`."""
        endings = list(self._endings.values())
        self.exit_code, consequence = 1, False
        ours = None if problem or not any(ending.failed for ending in endings) else report.cause(endings)
        if ours is not None and (elsewhere is None or not ours.consequence):
            text, consequence = report.headline(ours), ours.consequence
            self.story = report.describe(endings, self._output.last_lines(ours.rank))
            self.exit_code = report.exit_code(ours)
            if consequence and self._plan.nodes.several:
                self.story += (
                    "No machine told of a failure of its own: perhaps one is down, or its launcher was killed.\n"
                )
        else:
            text = problem or (elsewhere.text if elsewhere else "")
            self.story = f"{text}\n"
        if elsewhere is None or ours is not None:  # others know their own
            with contextlib.suppress(RendezvousLost):
                self._peers.publish_failure(text, consequence or elsewhere is not None)
        if self._remaining_restarts > 0 and self._peers.any_finished():
            self._remaining_restarts = 0
            self.story += "There is no restart: another machine has ended its part already.\n"
        self._failed = True
        self.refused = bool(endings) and all(ending.refusal for ending in endings)
        self._shutdown()
        if self._remaining_restarts == 0:
            with contextlib.suppress(RendezvousLost):
                self._peers.linger()
        failed = {e.rank: ProcessFailure(e.rank - self._ranks[0], 0, e.code or 1, "") for e in endings if e.failed}
        return RunResult(WorkerState.FAILED, failures=failed)

    def _wait_for_cause(self) -> Failure | None:
        """If only secondary failures have been reported, wait briefly for the root cause, also of other machines."""
        deadline = time.monotonic() + SETTLE_SECONDS
        elsewhere: Failure | None = self._peers.poll()
        while (
            all(ending.consequence or ending.refusal for ending in self._endings.values() if ending.failed)
            and (len(self._endings) < self._plan.nproc or self._plan.nodes.several)
            and (elsewhere is None or elsewhere.consequence)
            and time.monotonic() < deadline
        ):
            self._interrupts.check()
            time.sleep(self._plan.monitor_seconds)
            self._poll_workers()
            elsewhere = self._peers.poll()
        self._poll_workers(patience=0.0)  # also those that have failed and not yet ended
        return elsewhere if elsewhere is not None and not elsewhere.consequence else None

    def _poll_workers(self, patience: float = LINGER_SECONDS) -> None:
        """Record which workers have ended since the last poll, or have failed more than `patience` seconds ago."""
        exits = self._processes.exits()
        now = time.time()
        left = len(self._exited())
        for local_rank, rank in enumerate(self._ranks):
            if local_rank in self._endings:
                continue
            code = exits.get(local_rank)
            error = report.read_error(self._error_file(rank)) if code != 0 else None
            if code is not None or (error is not None and now - error.time >= patience):
                expendable = self._is_expendable(local_rank, rank, code)
                self._endings[local_rank] = ending = report.Ending(rank, code, now, error, expendable, self._role(rank))
                if expendable:
                    late = code == 0 or local_rank in self._too_late
                    what = f"rank {rank} came too late to join" if late else report.headline(ending)
                    say(f"paceline: {what}; the others go on.\n")
                    self._restart_rank(local_rank, rank, ending)
        self._end_latecomers(now)
        if len(self._exited()) > left:
            self._peers.publish_exits(self._exited())

    def _is_expendable(self, local_rank: int, rank: int, code: int | None) -> bool:
        """Can the others go on without this rank? It was killed, and had said that they can; or it was to rejoin them,
        and they do not count on it yet."""
        path = self._error_file(rank)
        if local_rank in self._rejoined and not os.path.exists(path + JOINED):
            return code is not None
        return code is not None and code < 0 and os.path.exists(path + MAY_DIE)

    def _role(self, rank: int) -> str:
        """What the rank is for the others, as it has said; "" where all ranks are alike."""
        try:
            with open(self._error_file(rank) + ROLE) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def _restart_rank(self, local_rank: int, rank: int, ending: report.Ending) -> None:
        """Start one rank again alone, to rejoin the others, if a signal killed it and restarts are left."""
        ticket = self._error_file(rank) + TICKET_FILE
        ended = any(other.code == 0 for other in self._endings.values())
        if ending.error is not None or self._remaining_restarts < 1 or ended or not os.path.exists(ticket):
            return
        self._remaining_restarts -= 1
        most = self._plan.max_restarts
        print(
            f"paceline: restart {most - self._remaining_restarts} of {most}: rank {rank}, to join the others.",
            file=sys.stderr,
            flush=True,
        )
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._error_file(rank) + JOINED)
        output = self._output.open(rank, first=local_rank == 0)
        command = self._commands[local_rank]
        environ = {**command.environ, TICKET: ticket}
        try:
            self._processes.restart(local_rank, command._replace(environ=environ, output=output))
        finally:
            if output is not None:
                output.close()
        self._rejoined.add(local_rank)
        del self._endings[local_rank]

    def _end_latecomers(self, now: float) -> None:
        """Kill ranks that were to rejoin others, which have all ended since, and that do not notice it."""
        endings = self._endings.values()
        if not endings or any(ending.failed or now - ending.time < LATE_SECONDS for ending in endings):
            return
        running = self._running()
        if all(rank - self._ranks[0] in self._rejoined for rank in running):
            for rank, pid in running.items():
                if not os.path.exists(self._error_file(rank) + JOINED):
                    self._too_late.add(rank - self._ranks[0])
                    os.kill(pid, signal.SIGKILL)

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks that were killed, while the others went on."""
        return frozenset(ending.rank for ending in self._endings.values() if ending.expendable)

    def _exited(self) -> list[int]:
        """Ranks that have ended without an error."""
        return [ending.rank for ending in self._endings.values() if not ending.failed and not ending.expendable]

    def _running(self) -> dict[int, int]:
        """rank -> process id, of those that have not ended."""
        pids = zip(self._ranks, self._processes.pids)
        return {rank: pid for index, (rank, pid) in enumerate(pids) if index not in self._endings}

    def _timed_out(self) -> str | None:
        """Where the ranks are, once the plan's time has run out."""
        limit = self._plan.timeout_seconds
        if limit is None or time.monotonic() - self._began < limit:
            return None
        running = self._running()
        where = sample_stacks({rank: self._error_file(rank) for rank in self._ranks}, running)
        lines = [f"not done after {limit:g} s"]
        lines += [f"rank {rank} stands at {where[rank]}" if rank in where else f"rank {rank} runs" for rank in running]
        return "\n".join(lines)

    # ------------------------------------------------------------ ending

    def _exit_barrier(self) -> None:
        """Wait for the other machines as long as they live. (torch's barrier waits 300 seconds, deaf to Ctrl-C.)"""
        self._interrupts.deferred = False
        failure = self._peers.finish()
        if failure is not None:
            self.exit_code, self.story = 1, f"{failure.text}\n"

    def leave(self, why: str) -> None:
        """Tell the other machines that this one ends, and why."""
        if self._peers is not None:
            self._peers.publish_failure(why, False)
            self._peers.linger()

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """torch calls it at every end of a run with a signal and a delay. Both are decided here instead."""
        interrupted = self._interrupts.received[:1] == [signal.SIGINT]
        self._processes.stop(signal.SIGINT if interrupted else signal.SIGTERM, lambda: self._interrupts.impatient)
        self._output.show()
