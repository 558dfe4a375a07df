"""torch's elastic agent, with our own processes: starts the workers, watches them and ends them together.

torch.distributed.elastic does the rendezvous, numbers the ranks and runs the monitoring loop (SimpleElasticAgent). Its
abstract methods are implemented here, because its LocalElasticAgent has four problems: it waits 30 seconds for a worker
that ignores SIGTERM, reports the first failure that it sees as the cause, leaves the workers running when the launcher
is killed, and reports nothing to the agents of other machines.

A failure goes through these phases:

1. The agent detects a failure: a worker has ended with a nonzero exit code or a signal, or has recorded an exception
   more than LINGER_SECONDS ago without ending. Or another machine reports a failure, or a rank waits for another rank
   that has ended.
2. If only secondary failures have been reported, wait up to SETTLE_SECONDS for the root cause. If the script refuses
   its arguments, also wait for the first rank, because its output is shown. If the next start may leave out the failed
   ranks, wait for further ranks that fail independently: if all ranks fail, the script is at fault.
3. Report the failure to the other machines.
4. Before a restart, let the other workers save their state.
5. End the other workers with SIGTERM, after 3 seconds with SIGKILL, and all processes that the workers have started.
6. Report the cause. Restart all workers, or end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.launcher import early_start, endings, processes, report
from paceline.launcher.checks import device_capacity, device_count
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import Output, say
from paceline.launcher.peers import POLL_SECONDS, Failure, Peers, RendezvousLost
from paceline.launcher.plan import Plan
from paceline.launcher.rendezvous import MachinesRendezvous
from paceline.launcher.restart_policy import Restarts
from paceline.launcher.stacks import sample_stacks
from paceline.launcher.stalls import Stalls, Verdict
from paceline.launcher.stop_request import StopRequest
from paceline.timeline.chrome_trace import join_left
from paceline.torch_private.elastic import SimpleElasticAgent
from paceline.world import (
    BEAT,
    CLOSED,
    KEEPS,
    ROLE,
    SAVED,
    SAVES,
    TRACE,
    WRITES,
    WRITING,
    World,
    read_beat,
    read_message,
    reported_by_all,
)

SETTLE_SECONDS = 1.0
RECORD_SECONDS = 10.0
# Time to wait for further ranks that die of the same cause: the fraction SPREAD of the time since the ranks started, at
# most SPREAD_SECONDS.
SPREAD, SPREAD_SECONDS = 0.5, 5.0
HANDOVER_SECONDS = 30.0  # for surviving ranks to reach their next collective, and save their state
WRITING_SECONDS = 300.0  # the same limit while a rank is writing its state
_HEAR_SECONDS = 2 * POLL_SECONDS  # for a report from another machine to arrive here
SAVE_SECONDS = 300.0  # for ranks to save a checkpoint when machines have joined; those machines wait for 600 s
LINGER_SECONDS = 10.0  # for the exit functions of a failed script, such as uploading a log


class Agent(SimpleElasticAgent):
    """The elastic agent of this machine.

    Args:
        spec: torch's specification of the workers.
        plan: the plan of the run.
        output: the ranks' output.
        interrupts: Ctrl-C and SIGTERM.
        early: the first workers, if they are running already.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        plan: Plan,
        output: Output,
        interrupts: Interrupts,
        early: early_start.EarlyWorkers | None = None,
    ) -> None:
        super().__init__(spec)
        self.exit_code = 0  # the launcher's
        self.report = ""  # the report of the failure, ending in a newline
        self.refused = False  # whether the script refused its arguments on all ranks
        self._plan, self._output, self._interrupts = plan, output, interrupts
        self._early = early
        self._processes = processes.Processes([])
        self._ranks = range(0)  # the ranks of this machine
        self._endings: dict[int, report.Ending] = {}  # local rank -> its ending, as first noticed
        self._restarts = Restarts(plan.max_restarts, *(plan.elastic or (plan.nproc, plan.nproc)), plan.nproc)
        self._reported_ranks = self._restarts.full  # the number of processes last reported to the user
        self._rounds = 0  # rounds that used the stores of this rendezvous
        self._failed = False  # whether the workers were ended because of a failure
        self._again = False  # whether the next start follows the loss of a rendezvous
        self._began = self._round_began = time.monotonic()
        self._stalls = Stalls({}, True)
        self._stop_request: StopRequest | None = None  # None: this run cannot be asked to stop with a checkpoint
        self._peers: Any = None
        self._relay_port: int | None = None  # the loopback port that forwards to the workers' store on another machine

    # ------------------------------------------------------------ starting

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._again:  # supervise.py has reported why
            self._again = False
        elif self._restarts.starts and self._failed:
            say(f"{self.report}paceline: restart {self._restarts.used} of {self._restarts.most}.\n")
            self.report = ""  # reported
        elif self._restarts.starts:
            say("paceline: machines have joined; all ranks restart.\n")
        ranks = self._restarts.ranks
        if ranks != self._reported_ranks:
            self._reported_ranks = ranks
            processes = "1 process" if ranks == 1 else f"{ranks} processes"
            say(f"paceline: {processes} on this machine now (--nproc {self._restarts.fewest}:{self._restarts.full}).\n")
        self._plan = replace(self._plan, nproc=ranks)
        worker_group.spec.local_world_size = ranks
        worker_group.store = self._store = None  # drop the previous store, so that it stops listening
        self._interrupts.deferred = False  # no worker is running: a signal may end the launcher at once
        self._interrupts.check()
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node: Any = worker_group.group_rank  # an int by now, although torch's annotations allow None
        nodes: Any = worker_group.group_world_size
        store: Any = worker_group.store
        first = worker_group.workers[0].global_rank
        self._ranks = range(first, first + self._plan.nproc)
        self._endings, self._failed = {}, False
        self._round_began = time.monotonic()
        self.exit_code, self.report = 0, ""
        store = self._of_this_round(store)
        self._rounds += 1
        self._peers = Peers(store, node, nodes, self._plan.nodes.endpoint, self._interrupts.check)
        starts, used = self._peers.agree(self._restarts.starts, self._restarts.used)
        self._restarts = self._restarts.met(starts, used)
        self._relay_port = None
        handler: Any = worker_group.spec.rdzv_handler
        if isinstance(handler, MachinesRendezvous):
            self._relay_port = handler.relay_to_workers(starts)
            if self._relay_port is None:
                own = handler.open_workers_store(str(worker_group.master_addr)) if node == 0 else None
                worker_group.master_port = self._peers.share_port(own)
        files = {rank: self._error_file(rank) for rank in self._ranks}
        several, limit = self._plan.nodes.several, self._plan.stall_seconds
        alone, action = len(files) == 1 and not several, self._plan.stall_action
        on_cpus = (self._plan.device or "").startswith("cpu") or device_count() == 0
        self._stalls = Stalls(files, alone, several=several, on_cpus=on_cpus, seconds=limit, action=action)
        if self._interrupts.stoppable or self._interrupts.notices:
            path = early_start.stop_file(self._output, starts)
            self._stop_request = StopRequest(path, self._peers, node, nodes)
            self._interrupts.consult(self._would_save)
        self._interrupts.deferred = True
        self._interrupts.check()
        early, self._early = self._early, None
        if early is not None:
            self._processes = early.processes
            return dict(enumerate(self._processes.pids))
        commands = [self._command(worker_group, worker, starts) for worker in worker_group.workers]
        try:
            self._processes = processes.start(commands, self._output.private)
        finally:
            early_start.close_outputs(commands)
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
        request = self._stop_request
        return early_start.command(
            self._plan,
            world,
            self._output,
            rendezvous.get_run_id(),
            starts=starts,
            stop_file=request.path if request is not None and request.works else None,
            notices=self._interrupts.notices,
            store_port=self._relay_port,
        )

    def _role(self, rank: int) -> str:
        """Return the rank's role, or "" if all ranks have the same role."""
        return read_message(self._error_file(rank), ROLE) or ""

    def _error_file(self, rank: int) -> str:
        return early_start.error_file(self._output, rank, self._restarts.starts - 1)

    # ------------------------------------------------------------ watching

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._interrupts.check()
        self._poll_workers()
        self._output.show()
        if self._stop_request is not None:
            self._stop_request.poll(self._interrupts.asked is not None)
        if any(ending.failed for ending in self._endings.values()):
            return self._fail(None, self._wait_for_cause())
        elsewhere = self._peers.poll()
        if elsewhere is not None:
            return self._fail(None, elsewhere)
        if len(self._endings) == self._plan.nproc:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ranks))
        left = [*self._exited(), *self._peers.exited]
        verdict = self._timed_out() or self._stalls.poll(self._running(), left)
        if verdict is None:
            return RunResult(WorkerState.HEALTHY)
        result = self._fail(verdict.report, None, verdict.final)
        self.exit_code = verdict.exit_code
        return result

    def _fail(self, problem: str | None, elsewhere: Failure | None, final: bool = False) -> RunResult:
        """End this machine's workers, and report the reason.

        Args:
            problem: the reason if it is neither a worker's failure nor another machine's.
            elsewhere: the failure that another machine has reported.
            final: do not restart.
        """
        seen = [*self._endings.values(), *self._leaving()]
        self.exit_code, consequence = 1, False
        ours = None if problem or not any(ending.failed for ending in seen) else report.cause(seen)
        if ours is not None and (elsewhere is None or not ours.consequence):
            text, consequence = report.headline(ours), ours.consequence
            where = self._where_others_are() if ours.in_collective else {}
            seen = [*self._endings.values(), *self._leaving()]
            stopped = endings.stopped_in_words(self._running(), self._role) if consequence else ""
            self.report = stopped + report.describe(seen, self._output.last_lines(ours.rank), where)
            self.exit_code = report.exit_code(ours)
            if consequence and self._plan.nodes.several:
                alone = "No machine has reported a root cause: a machine may be down, or its launcher was killed."
                self.report += f"{alone}\n"
        else:
            text = problem or (elsewhere.text if elsewhere else "")
            self.report = f"{text}\n"
        if elsewhere is None or ours is not None:  # the other machines know their failure
            with contextlib.suppress(RendezvousLost):
                self._peers.publish_failure(text, consequence or elsewhere is not None)
        again = None if final else self._after_failure()
        if problem is None and again is not None:
            self._await_handover()
        self._failed = True
        self.refused = bool(seen) and all(ending.refusal for ending in seen)
        self._shutdown()
        self._remaining_restarts = 0 if again is None else 1  # torch restarts if this is above 0, and subtracts 1
        if again is None:
            with contextlib.suppress(RendezvousLost):
                self._peers.linger()
        else:
            self._restarts = again
        failed = {e.rank: ProcessFailure(e.rank - self._ranks[0], 0, e.code or 1, "") for e in seen if e.failed}
        return RunResult(WorkerState.FAILED, failures=failed)

    def _where_others_are(self) -> dict[int, str]:
        """Return rank -> current line of its script, for the ranks that have not ended.

        The loss of a rank may have ended the scripts of other ranks. Such a rank has left its script, but it may not
        have recorded its exception yet: a hook of the script comes first. Wait for the record, up to RECORD_SECONDS.
        """
        deadline = time.monotonic() + RECORD_SECONDS
        while True:
            running = self._running()
            samples = sample_stacks({rank: self._error_file(rank) for rank in running}, running)
            if all(sample.in_script for sample in samples.values()) or time.monotonic() > deadline:
                return {rank: str(sample) for rank, sample in samples.items() if sample.in_script}
            time.sleep(self._plan.monitor_seconds)
            self._poll_workers(patience=0.0)

    def _after_failure(self) -> Restarts | None:
        """Return the state of the restart policy for the next start, or None if the run ends."""
        if not self._restarts.left:
            return None
        if self._peers.any_finished():
            self.report += "No restart: another machine has already finished.\n"
            return None
        seen = self._endings.values()
        died = sum(ending.is_cause for ending in seen)
        capacity = device_capacity(self._plan.device, device_count(), self._plan.on_cpu)
        again = self._restarts.after_failure(died, self._moved(), capacity)
        if again is None:
            self.report += (
                f"No restart: this machine has devices for {capacity} ranks, but --nproc requires at least "
                f"{self._restarts.fewest}.\n"
            )
        return again

    def _moved(self) -> bool:
        """Return whether a rank of this machine has started a batch."""
        return any(read_beat(self._error_file(rank) + BEAT) for rank in self._ranks)

    def _await_handover(self) -> None:
        """Wait until the surviving ranks have saved their state for the restart (state/newest_state.py).

        The ranks learn of the failure at their next collective.
        """
        began = time.monotonic()
        while True:
            ended = self._processes.exits()
            left = [rank for local_rank, rank in enumerate(self._ranks) if local_rank not in ended]
            kept = [text for rank in left if (text := read_message(self._error_file(rank), KEEPS)) is not None]
            if not kept or time.monotonic() - began > (WRITING_SECONDS if WRITING in kept else HANDOVER_SECONDS):
                return
            self._interrupts.check()
            time.sleep(self._plan.monitor_seconds)

    def _wait_for_cause(self) -> Failure | None:
        """If only secondary failures have been reported, wait briefly for the root cause, here or on other machines.

        If SIGTERM has killed a rank, also wait briefly for a SIGTERM to the launcher, which asks the run to end.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while any(ending.code == -signal.SIGTERM for ending in self._endings.values()) and time.monotonic() < deadline:
            if self._interrupts.asked == signal.SIGTERM:
                raise Stopped(signal.SIGTERM)
            self._look_again()
        elsewhere: Failure | None = self._peers.poll()
        while (
            all(ending.consequence or ending.refusal for ending in self._endings.values() if ending.failed)
            and (len(self._endings) < self._plan.nproc or self._plan.nodes.several)
            and (elsewhere is None or elsewhere.consequence)
            and time.monotonic() < deadline
        ):
            elsewhere = self._look_again()
        now = time.monotonic()
        deadline = now + min(SPREAD * (now - self._round_began), SPREAD_SECONDS)
        counts = self._restarts.counts_the_dead(self._moved())
        while counts and len(self._endings) < self._plan.nproc and time.monotonic() < deadline:
            elsewhere = self._look_again()
        self._poll_workers(patience=0.0)  # include workers that have failed but not ended
        return elsewhere if elsewhere is not None and not elsewhere.consequence else None

    def _look_again(self) -> Failure | None:
        self._interrupts.check()
        time.sleep(self._plan.monitor_seconds)
        self._poll_workers()
        return self._peers.poll()

    def _poll_workers(self, patience: float = LINGER_SECONDS) -> None:
        """Record the workers that have ended since the last poll, or failed more than `patience` seconds ago."""
        exits = self._processes.exits()
        now = time.time()
        left = len(self._exited())
        for local_rank, rank in enumerate(self._ranks):
            if local_rank in self._endings:
                continue
            code, path = exits.get(local_rank), self._error_file(rank)
            if code is None and patience == 0.0:
                code = endings.reported_exit_code(path)
            if endings.ended_when_saved(path, code):
                code = 0
            if endings.crashed_when_done(path, code):
                crash = report.headline(endings.make_ending(rank, code, now, None, "", "", self._output))
                say(f"paceline: {crash} after its script and all exit functions had finished. This is not an error.\n")
                code = 0
            error = report.read_error(path) if code != 0 else None
            if code is not None or (error is not None and now - error.time >= patience):
                role = self._role(rank)
                self._endings[local_rank] = endings.make_ending(rank, code, now, error, role, path, self._output)
        if len(self._exited()) > left:
            self._peers.publish_exits(self._exited())

    @property
    def leads(self) -> bool:
        """Whether rank 0 is on this machine."""
        return 0 in self._ranks

    @property
    def saved(self) -> str | None:
        """The checkpoint that the ranks saved on request before they ended, and how to resume from it, or None."""
        return next(filter(None, (read_message(self._error_file(rank), SAVED) for rank in self._ranks)), None)

    def _would_save(self) -> bool:
        """Return whether the ranks of this machine would save a checkpoint if asked to stop.

        Also True if the ranks have just saved a checkpoint on request and are ending: a second signal must not abort
        that.
        """
        running = self._running()
        able = reported_by_all(map(self._error_file, running), SAVES, SAVED)
        return bool(running) and able and not any(ending.failed for ending in self._endings.values())

    def _leaving(self) -> list[report.Ending]:
        """Return the endings of ranks that have finished their script with exit code 0, but are still exiting."""
        places = {rank: endings.read_place(self._error_file(rank)) for rank in self._running()}
        return [report.Ending(rank, 0, time.time(), place=place) for rank, place in places.items() if place]

    def _exited(self) -> list[int]:
        """Return the ranks that have ended without an error."""
        return [ending.rank for ending in self._endings.values() if not ending.failed]

    def _running(self) -> dict[int, int]:
        """Return rank -> process id, for the ranks that have not ended."""
        pids = zip(self._ranks, self._processes.pids)
        return {rank: pid for index, (rank, pid) in enumerate(pids) if index not in self._endings}

    def _timed_out(self) -> Verdict | None:
        """Return a verdict with each rank's position if the plan's time limit has passed."""
        limit = self._plan.timeout_seconds
        if limit is None or time.monotonic() - self._began < limit:
            return None
        running = self._running()
        where = sample_stacks({rank: self._error_file(rank) for rank in self._ranks}, running)
        lines = [f"not done after {limit:g} s"]
        lines += [f"rank {rank} is at {where[rank]}" if rank in where else f"rank {rank} runs" for rank in running]
        return Verdict("\n".join(lines), 1)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart the workers. torch calls this after a failure, and when machines have joined."""
        if self._failed or self._is_left_for_others():
            super()._restart_workers(worker_group)

    def _is_left_for_others(self) -> bool:
        """After machines have joined, let the ranks save a checkpoint and end, so that no step is repeated.

        Returns:
            Whether to restart all ranks now. False: the training has finished or failed, or was asked to stop. The next
            poll handles this.
        """
        began, broken_since = time.monotonic(), 0.0
        while True:
            self._interrupts.check()
            endings = self._endings.values()
            if self._peers.poll() is not None or any(ending.is_cause for ending in endings):
                return False
            now, running = time.monotonic(), self._running()
            if any(ending.failed for ending in endings):  # secondary failures: wait for the report of a root cause
                broken_since = broken_since or now
                if now - broken_since >= _HEAR_SECONDS:
                    return True
            elif not running:
                return self.saved is not None and not self._was_asked()
            elif now - began >= _HEAR_SECONDS:  # a failed machine may rejoin before its failure report is read
                # Also wait for ranks with a closed run: they have saved, finished or failed, and are ending.
                leaves = reported_by_all(map(self._error_file, running), SAVES, CLOSED)
                if self._stop_request is None or not leaves or now - began > SAVE_SECONDS:
                    return True
                self._stop_request.poll(self._interrupts.asked is not None, machines_come=self._would_save())
            time.sleep(self._plan.monitor_seconds)
            self._poll_workers()
            self._output.show()

    def _was_asked(self) -> bool:
        """Return whether a signal has asked the run to stop, here or on another machine."""
        if self._interrupts.asked is not None and self._stop_request is not None:
            self._stop_request.poll(asked=True)  # the signal may be new, and the other machines must learn of it
        return int(self._peers.count("asked")) > 0

    def _assign_worker_ranks(self, store: Any, *rest: Any) -> Any:
        """Assign ranks with the store of this round, because torch leaves the last round's rank counts in the store."""
        return super()._assign_worker_ranks(self._of_this_round(store), *rest)

    def _of_this_round(self, store: Any) -> Any:
        """Return a store for this round. A static rendezvous uses one store for all rounds, so prefix the keys."""
        if self._plan.nodes.backend != "static":
            return store
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(str(self._rounds), store)

    # ------------------------------------------------------------ ending

    def _exit_barrier(self) -> None:
        """Wait until the other machines have finished or failed. (torch's barrier ignores Ctrl-C for 300 seconds.)"""
        self._interrupts.deferred = False
        failure = self._peers.finish()
        if failure is not None:
            self.exit_code, self.report = 1, f"{failure.text}\n"

    @property
    def restarts_used(self) -> int:
        return self._restarts.used

    def restarts_without_host(self) -> bool:
        """Use a restart after the loss of the rendezvous host. Return whether the ranks may restart."""
        again = self._restarts.after_loss_of_host(self._failed) if self._restarts.starts else None  # None: no start
        if again is not None:
            self._restarts = again
        return again is not None

    def follow(self, former: Agent) -> None:
        """Continue the work of this launcher's previous agent, which has lost its rendezvous."""
        self._restarts, self._reported_ranks, self._again = former._restarts, former._reported_ranks, True

    def leave(self, why: str) -> None:
        """Report to the other machines that this machine ends its part of the run, and why."""
        if self._peers is not None:
            self._peers.publish_failure(why, False)
            self._peers.linger()

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """End the workers. torch calls this with a signal and a delay, but both are decided here instead."""
        interrupted = self._interrupts.received[:1] == [signal.SIGINT]
        if not interrupted:  # SIGINT lets a rank finish writing a checkpoint; SIGTERM would kill it meanwhile
            self._await_writes()
        if self._stop_request is not None:
            self._stop_request.end()
        signum = signal.SIGINT if interrupted else signal.SIGTERM
        busy = lambda: not self._interrupts.breaks_writes_off and bool(self._writes())  # noqa: E731
        self._processes.stop(signum, lambda: self._interrupts.impatient, busy)
        self._output.show()
        # Join the ranks' trace files. Rank 0 has done this already, unless it was killed.
        for file in {read_message(self._error_file(rank), TRACE) for rank in self._ranks} - {None}:
            join_left(str(file), self._ranks, lambda line: say(f"{line}\n"))

    def _await_writes(self) -> None:
        """Wait until the ranks have finished their checkpoint writes in the background (state/background_write.py)."""
        began, before, first = time.monotonic(), len(self._interrupts.received), self._writes()
        said = False
        while any(self._writes().get(rank) == step for rank, step in first.items()):
            waited = time.monotonic() - began
            if (
                len(self._interrupts.received) > before
                or self._interrupts.breaks_writes_off
                or waited > processes.BUSY_SECONDS
            ):
                return
            if not said and waited > 1.0:
                said = True
                steps = ", ".join(sorted(set(first.values())))
                say(f"paceline: waiting for the checkpoint of step {steps}, which is being written.\n")
            time.sleep(self._plan.monitor_seconds)
            self._output.show()

    def _writes(self) -> dict[int, str]:
        """Return rank -> step, for the ranks of this machine that write a checkpoint in the background."""
        ended = self._processes.exits()
        left = (rank for local_rank, rank in enumerate(self._ranks) if local_rank not in ended)
        found = {rank: read_message(self._error_file(rank), WRITES) for rank in left}
        return {rank: step for rank, step in found.items() if step is not None}
