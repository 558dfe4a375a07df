"""Starting, watching and ending the worker processes of a run. Importing this imports no torch.

nodes.py               which machines take part and where they meet (pure)
checks.py              the script, an outer launcher, a port, devices: checked before anything starts
plan.py                what is run, with which command line and environment (pure)
worker.py              what each worker runs: the user's script, as plain python would
processes.py           starting and ending operating-system processes
output.py              what the ranks print
rendezvous.py          a store that listens on loopback only; for several machines torch's rendezvous
agent.py               torch's elastic agent, with processes of our own
peers.py               what the launchers of several machines tell each other
early_exits.py         a rank that has ended while others go on
stalls.py              ranks that wait for others
report.py              which rank is the cause of a failure, and how to say it (pure)
interrupts.py          Ctrl-C and SIGTERM
supervise.py           a run, from the rendezvous to the last message
function.py            paceline.launch: a function in place of a script
environment_report.py  what `paceline env` prints
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.config import StrategySpec
from paceline.launcher.nodes import ALONE, Nodes


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """While torch is being loaded, its C++ part logs errors only. Where a connection breaks it would log pages of
    warnings, of which the launcher says a line. torch reads the level at its import; the workers keep theirs."""
    level = "TORCH_CPP_LOG_LEVEL"
    ours = level not in os.environ
    if ours:
        os.environ[level] = "ERROR"
    try:
        yield
    finally:
        if ours:
            del os.environ[level]


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    nproc: str | int = 1,
    settings: Mapping[str, object] | None = None,
    module: bool = False,
    nodes: Nodes = ALONE,
    max_restarts: int = 0,
    monitor_seconds: float = 0.05,
    output: str | None = None,
    tee: str = "",
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
        monitor_seconds: between two polls of the workers.
        output: directory for what the ranks other than the first print; None: a temporary one.
        tee: ranks whose output is shown too, such as "1,3" or "all".
        check_strategy: see plan.StrategyCheck.

    Returns:
        The launcher's exit code: 0, that of the rank that failed first, or 128 + n for a signal n.

    Raises:
        LaunchError: something that was asked for cannot be run, or a process could not be started.
        SettingError: a setting that cannot work.
    """
    from paceline.launcher.interrupts import Interrupts, Stopped
    from paceline.launcher.output import Output, say
    from paceline.launcher.plan import make_plan

    with _quietly():
        plan = make_plan(
            script,
            args,
            nproc,
            settings or {},
            check_strategy,
            kind="module" if module else "script",
            nodes=nodes,
            max_restarts=max_restarts,
            monitor_seconds=monitor_seconds,
            output=output,
            tee=tee,
        )
    if nodes.unused:
        print(
            f"paceline: {', '.join(nodes.unused)}: not used, since there is one machine, whose processes meet on "
            "loopback. For several give --nnodes too.",
            file=sys.stderr,
            flush=True,
        )
    with Interrupts() as interrupts:
        ranks = Output(plan.output, plan.tee)
        try:
            with _quietly():
                from paceline.launcher.supervise import supervise
            outcome = supervise(plan, interrupts, ranks)
        except BaseException as error:
            ranks.close(failed=False)
            if isinstance(error, Stopped):
                return error.report()
            raise
        where = ranks.close(failed=outcome.exit_code != 0 and not outcome.refused)
        if outcome.exit_code != 0:
            say(outcome.story + where)
        return outcome.exit_code
