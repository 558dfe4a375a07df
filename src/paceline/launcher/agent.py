"""torch's elastic agent, with processes of our own: starts the workers, watches them, ends them together.

torch.distributed.elastic does the rendezvous, numbers the ranks and runs the loop that watches (SimpleElasticAgent).
The four methods it asks for are here. Its LocalElasticAgent would do, but for three things: it waits 30 seconds for a
worker that does not heed SIGTERM, it names as cause whichever rank was seen to fail first, and it leaves the workers
running when the launcher is killed.

A failure goes through these phases:

1. A worker is seen to have failed: a non-zero exit code, a signal, or an exception that it wrote down and has not
   ended after for LINGER_SECONDS.
2. If all that failed so far only complain about another rank, wait up to SETTLE_SECONDS for that one's own story.
3. End the others: SIGTERM, after 3 seconds SIGKILL, and whatever processes the workers had started.
4. Print the cause.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import uuid
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.launcher import processes, report
from paceline.launcher.interrupts import Interrupts
from paceline.launcher.plan import Plan, available_cores, command_line, worker_environment
from paceline.launcher.rendezvous import loopback_rendezvous
from paceline.world import World

MONITOR_SECONDS = 0.05  # between two looks at the workers
SETTLE_SECONDS = 1.0
LINGER_SECONDS = 10.0  # for exit functions of a failed script, such as uploading a log


def supervise(plan: Plan, interrupts: Interrupts) -> int:
    """Run `plan` to its end, print what went wrong, and return the launcher's exit code.

    Raises:
        Stopped: a signal ended the run; no worker is left.
        LaunchError: a worker could not be started.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        spec = WorkerSpec(
            role="default",
            local_world_size=plan.nproc,
            entrypoint=plan.script,
            rdzv_handler=loopback_rendezvous(uuid.uuid4().hex),
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
        )
        agent = Agent(spec, plan, directory, interrupts)
        try:
            result = agent.run()
        finally:
            spec.rdzv_handler.shutdown()
        endings = agent.endings()
    if not result.is_failed():
        return 0
    print(report.describe(endings), end="", file=sys.stderr, flush=True)
    return report.exit_code(report.cause(endings))


class Agent(SimpleElasticAgent):
    """The elastic agent of this machine.

    Args:
        spec: what torch's part needs to know.
        plan: what to run.
        directory: an empty directory for the workers' error files.
        interrupts: tells of Ctrl-C and SIGTERM.
    """

    def __init__(self, spec: WorkerSpec, plan: Plan, directory: str, interrupts: Interrupts) -> None:
        super().__init__(spec)
        self._plan = plan
        self._directory = directory
        self._interrupts = interrupts
        self._processes = processes.Processes([])
        self._first_rank = 0
        self._endings: dict[int, report.Ending] = {}  # local rank -> the first sight of its end

    def endings(self) -> list[report.Ending]:
        """How the ranks ended by themselves; of those that the agent ended, nothing."""
        return list(self._endings.values())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._first_rank = worker_group.workers[0].global_rank
        self._interrupts.deferred = True
        self._interrupts.check()
        node: Any = worker_group.group_rank  # numbers by now; torch's annotations say None
        nodes: Any = worker_group.group_world_size
        commands = []
        for worker in worker_group.workers:
            world = World(
                worker.global_rank,
                worker.world_size,
                worker.local_rank,
                worker_group.spec.local_world_size,
                node,
                nodes,
                "paceline",
                worker_group.master_addr,
                worker_group.master_port,
            )
            environ = worker_environment(
                self._plan,
                world,
                error_file=self._error_file(worker.local_rank),
                run_id=worker_group.spec.rdzv_handler.get_run_id(),
                launcher_pid=os.getpid(),
                cores=available_cores(),
                environ=os.environ,
            )
            commands.append((command_line(self._plan), environ))
        self._processes = processes.start(commands)
        return dict(enumerate(self._processes.pids))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._interrupts.check()
        self._look()
        failed = [ending for ending in self._endings.values() if ending.failed]
        if not failed:
            if len(self._endings) < self._plan.nproc:
                return RunResult(WorkerState.HEALTHY)
            return RunResult(
                WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
            )
        self._settle()
        self._shutdown()
        failures = {
            ending.rank: ProcessFailure(ending.rank - self._first_rank, 0, ending.code or 1, "")
            for ending in self._endings.values()
            if ending.failed
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while (
            all(ending.consequence for ending in self._endings.values() if ending.failed)
            and len(self._endings) < self._plan.nproc
            and time.monotonic() < deadline
        ):
            self._interrupts.check()
            time.sleep(MONITOR_SECONDS)
            self._look()
        self._look(patience=0.0)  # also those that have failed and not yet ended

    def _look(self, patience: float = LINGER_SECONDS) -> None:
        """Note who has ended since the last look, or has failed for more than `patience` seconds."""
        exits = self._processes.exits()
        now = time.time()
        for local_rank in range(self._plan.nproc):
            if local_rank in self._endings:
                continue
            code = exits.get(local_rank)
            error = report.read_error(self._error_file(local_rank)) if code != 0 else None
            if code is not None or (error is not None and now - error.time >= patience):
                self._endings[local_rank] = report.Ending(self._first_rank + local_rank, code, now, error)

    def _error_file(self, local_rank: int) -> str:
        return os.path.join(self._directory, f"error-{local_rank}.json")

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """torch calls it at every end of a run, with a signal and a delay. Which, and how long, is ours to say."""
        interrupted = self._interrupts.received[:1] == [signal.SIGINT]
        self._processes.stop(signal.SIGINT if interrupted else signal.SIGTERM, lambda: self._interrupts.impatient)
