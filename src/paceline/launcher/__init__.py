"""Starting, watching and ending the worker processes of a run. Importing this imports no torch.

hosts.py               --hosts: on which machines, how ssh is called and what it says (pure)
ssh.py                 a launcher on each of these hosts, as one run
nodes.py               which machines take part and where they meet (pure)
checks.py              the script, an outer launcher, a port, devices: checked before anything starts
plan.py                what is run, with which command line and environment (pure)
worker.py              what each worker runs: the user's script, as plain python would
processes.py           starting and ending operating-system processes
early_start.py         the first workers on one machine, before the launcher has loaded torch
output.py              what the ranks print
streams.py             standard streams that are closed, full, or not read
rendezvous.py          where the workers meet, on one machine and on several
key_values.py          the requests of torch's client on a store
store.py               the store on this machine, for this user's processes
tunnel.py              the stores of several machines, for launchers that know the secret
secret.py              the file with the secret
store_redirect.py      in the ranks of several machines: the way to the store
agent.py               torch's elastic agent, with processes of our own
peers.py               what the launchers of several machines tell each other
stacks.py              where a worker stands: line and call, asked by a signal
process_state.py       what the kernel says of a process: stopped, waits for a disk, swaps
stalls.py              ranks that wait for others, and what keeps those that do not come, or have ended
endings.py             what can be found out of how a rank ended
stop_request.py        a signal that asks the run to save a checkpoint and end
report.py              which rank is the cause of a failure, and how to say it (pure)
interrupts.py          Ctrl-C and SIGTERM
import_hook.py         code around the execution of a module that a script imports
torch_import.py        loading torch faster, and the interpreter's end after it
supervise.py           a run, from the rendezvous to the last message
function.py            paceline.launch: a function in place of a script
environment_report.py  what `paceline env` prints
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
    """While torch is being loaded, its C++ part logs errors only. Where a connection breaks it would log pages of
    warnings, of which the launcher says a line. torch reads the level at its import; the workers keep theirs."""
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
    """Run `script` in `nproc` processes of this machine and wait until all have ended.

    Args:
        script: path of a Python file, or the name of a module.
        args: its arguments, untouched.
        nproc: the number of workers, or "gpu", "cpu" or "auto", as torchrun understands them.
        settings: those of the command line, by name; they override the script's. "config": a settings file.
        module: is `script` a module's name?
        nodes: the machines that take part.
        max_restarts: how often all workers are started again after a failure.
        memory_every: steps between two checkpoints in memory, from which a restart goes on; None: there are none.
        monitor_seconds: between two polls of the workers.
        output: directory for what the ranks other than the first print; None: a temporary one.
        tee: ranks whose output is shown too, such as "1,3" or "all".
        grace: at SIGTERM, seconds in which the run may save a checkpoint and end; 0: it is ended at once. None: 25 s
            where the script has called run.save or run.restore, and otherwise it is ended at once.
        stall_seconds: how long a rank may wait for others before it is said; None: by the usual time of a batch.
        stall_action: "say" it, "end" the run too, or "restart" all ranks, as `max_restarts` allows.
        check_strategy: see plan.StrategyCheck.

    Returns:
        The launcher's exit code: 0, that of the rank that failed first, 128 + n for a signal n, 75 where the run was
        asked to stop and has saved a checkpoint (SIGUSR1, or SIGTERM and `grace`), or 124 where a stall ended it.

    Raises:
        LaunchError: something that was asked for cannot be run, or a process could not be started.
        SettingError: a setting that cannot work.
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
                    f"paceline: {', '.join(nodes.unused)}: not used, since there is one machine, whose processes meet "
                    "on loopback. For several give --nnodes too.\n"
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
            if early is not None:  # perhaps the agent has not taken them over
                interrupts.deferred = True
                by_hand = isinstance(error, Stopped) and error.signum == signal.SIGINT
                early.processes.stop(signal.SIGINT if by_hand else signal.SIGTERM, lambda: interrupts.impatient)
            if ranks is not None:
                ranks.close(failed=False)
            if isinstance(error, Stopped):
                return error.report()
            raise
        where = ranks.close(failed=outcome.exit_code != 0 and not outcome.refused and not outcome.saved)
        if outcome.exit_code != 0:
            interrupts.deferred = False  # a reader that does not come keeps nobody from ending this
            say(outcome.story + where, last=True)
        return outcome.exit_code
