"""Start, watch and end the worker processes of a run. Importing this package does not import torch.

hosts.py               --hosts: the list of machines, the ssh command, and remedies for ssh's errors (pure)
ssh.py                 one launcher on each host, as one run
nodes.py               the machines of a run and their rendezvous (pure)
checks.py              checks before the start: script, outer launcher, ports, devices
plan.py                the plan of a run: command line and environment of each worker (pure)
worker.py              the program of each worker: runs the user's script as plain python would
processes.py           starting and ending operating-system processes
early_start.py         on one machine: start the first workers before the launcher has loaded torch
output.py              the ranks' output
streams.py             handle standard streams that are closed, full, or not read
rendezvous.py          the rendezvous and the stores, on one machine and on several
key_values.py          the operations of torch's store
store.py               the store on this machine, for this user's processes only
tunnel.py              encrypted connections to the stores, for launchers that know the secret
secret.py              the file with the secret
store_redirect.py      in the ranks: connect to the store through a local port
agent.py               torch's elastic agent, with our processes
peers.py               messages between the launchers of several machines
stacks.py              a worker's current line and call
stack_thread.py        in the ranks: a thread that reports the main thread's stack
process_state.py       the kernel's view of a process: stopped, waiting for a disk, swapping
stalls.py              ranks that wait for other ranks, and why those do not arrive
endings.py             how a rank ended
restart_policy.py      which ranks restart after which event (pure)
stop_request.py        a signal that asks the run to save a checkpoint and stop
report.py              which rank caused a failure, and the report (pure)
interrupts.py          Ctrl-C and SIGTERM
import_hook.py         run code around the execution of a module
torch_import.py        a faster import of torch, and a faster exit after it
supervise.py           a run, from the rendezvous to the last message
function.py            paceline.launch: a function instead of a script
environment_report.py  the report of `paceline env`
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.config import StrategySpec
from paceline.errors import LaunchError
from paceline.launcher.nodes import ALONE, Nodes
from paceline.launcher.torch_import import faster, variable
from paceline.world import NOTICE_SECONDS


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Set the log level of torch's C++ code to ERROR in this block, which imports torch. The workers keep their level.

    When a connection breaks, torch would log pages of warnings. The launcher prints one line instead.
    """
    level = "TORCH_CPP_LOG_LEVEL"
    with variable(level, os.environ.get(level, "ERROR")):
        yield


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    nproc: str | int = 1,
    settings: Mapping[str, object] | None = None,
    module: bool = False,
    nodes: Nodes = ALONE,
    max_restarts: int = 0,
    memory_every: int | None = None,
    monitor_seconds: float = 0.05,
    output: str | None = None,
    tee: str = "",
    grace: float | None = None,
    stall_seconds: float | None = None,
    stall_action: str = "say",
    check_strategy: Callable[[StrategySpec | None, int | None, int | None], int] | None = None,
) -> int:
    """Run `script` in `nproc` processes on this machine, and wait until all processes have ended.

    Args:
        script: path of a Python file, or the name of a module.
        args: arguments of the script, passed unchanged.
        nproc: the number of workers, or "gpu", "cpu" or "auto", as in torchrun.
        settings: settings of the command line, which override the script's. "config": a settings file.
        module: whether `script` is the name of a module.
        nodes: the machines of the run.
        max_restarts: the maximum number of restarts of all workers after failures.
        memory_every: steps between two in-memory checkpoints for restarts. None: no in-memory checkpoints.
        monitor_seconds: seconds between two polls of the workers.
        output: directory for the output of all ranks but the first. None: a temporary directory.
        tee: further ranks whose output is shown, such as "1,3" or "all".
        grace: the seconds that the run may take after SIGTERM to save a checkpoint and end. 0: end the run at once.
            None: 25 s if the script has called run.save or run.restore, otherwise 0.
        stall_seconds: seconds that a rank may wait for others before a report. None: based on the usual batch time.
        stall_action: "say": only report. "end": also end the run. "restart": restart all ranks (`max_restarts`).
        check_strategy: see plan.StrategyCheck.

    Returns:
        The launcher's exit code: 0; the exit code of the rank that failed first; 128 + n for a signal n; 75 if the run
        was asked to stop and has saved a checkpoint (SIGUSR1, or SIGTERM and `grace`); 124 if a stall ended it.

    Raises:
        LaunchError: the request cannot be run, or a process could not be started.
        SettingError: a setting has an invalid value.
    """
    from paceline.launcher import early_start
    from paceline.launcher.interrupts import Interrupts, Stopped
    from paceline.launcher.output import Output, say
    from paceline.launcher.plan import make_plan
    from paceline.launcher.stalls import check_options

    check_options(stall_seconds, stall_action, max_restarts)
    if grace is not None and not 0 <= grace < float("inf"):
        raise LaunchError(
            f"--grace {grace:g}: give the seconds for a checkpoint at SIGTERM, such as 25, or 0 to save none."
        )
    seconds = NOTICE_SECONDS if grace is None else grace or None
    with Interrupts(stoppable=True, grace=seconds, if_able=grace is None) as interrupts:
        ranks: Output | None = None
        early: early_start.EarlyWorkers | None = None
        try:
            with _quietly(), faster():
                plan = make_plan(
                    script,
                    args,
                    nproc,
                    settings or {},
                    check_strategy,
                    kind="module" if module else "script",
                    nodes=nodes,
                    max_restarts=max_restarts,
                    memory_every=memory_every,
                    monitor_seconds=monitor_seconds,
                    output=output,
                    tee=tee,
                    stall_seconds=stall_seconds,
                    stall_action=stall_action,
                )
            if nodes.unused:
                say(
                    f"paceline: {', '.join(nodes.unused)} has no effect on one machine, which uses loopback. For "
                    "several machines, give --nnodes too.\n"
                )
            ranks = Output(plan.output, plan.tee)
            if early_start.possible(plan):
                interrupts.deferred = True  # a process that is being started must not be lost
                early = early_start.start(plan, ranks, early_start.stop_file(ranks, 0), interrupts.notices)
                interrupts.deferred = False
                interrupts.check()
            with _quietly(), faster():
                from paceline.launcher.supervise import supervise
            outcome = supervise(plan, interrupts, ranks, early)
        except BaseException as error:
            if early is not None:  # the agent may not have taken over the early workers
                interrupts.deferred = True
                ctrl_c = isinstance(error, Stopped) and error.signum == signal.SIGINT
                early.processes.stop(signal.SIGINT if ctrl_c else signal.SIGTERM, lambda: interrupts.impatient)
            if ranks is not None:
                ranks.close(failed=False)
            if isinstance(error, Stopped):
                return error.report()
            raise
        where = ranks.close(failed=outcome.exit_code != 0 and not outcome.refused and not outcome.saved)
        if outcome.exit_code != 0:
            interrupts.deferred = False  # allow Ctrl-C while this waits for a slow reader
            say(outcome.report + where, last=True)
        return outcome.exit_code
