"""Starting, watching and ending the worker processes of a run. Importing this imports no torch.

plan.py         what is to be run, the command line and the environment of each worker (pure)
worker.py       what each worker runs: the user's script, as plain python would
processes.py    starting and ending operating-system processes
rendezvous.py   a store for torch's elastic agent that listens on loopback only
agent.py        torch's elastic agent, watching the processes
report.py       which rank is the cause of a failure, and how to say it (pure)
interrupts.py   Ctrl-C and SIGTERM
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def run(
    script: str, args: Sequence[str] = (), *, nproc: str | int = 1, settings: Mapping[str, object] | None = None
) -> int:
    """Run `script` in `nproc` processes of this machine and wait until all have ended.

    Args:
        script: path of a Python file.
        args: its arguments, untouched.
        nproc: the number of workers, or "gpu", "cpu" or "auto", as torchrun understands them.
        settings: those of the command line, by name; they override the script's.

    Returns:
        The exit code for the launcher: 0, that of the rank that failed first, or 128 + n for a signal n.

    Raises:
        LaunchError: `nproc` or `script` cannot be run, or a process could not be started.
    """
    from paceline.launcher.interrupts import Interrupts, Stopped
    from paceline.launcher.plan import make_plan

    plan = make_plan(script, args, nproc, settings or {})
    with Interrupts() as interrupts:
        try:
            from paceline.launcher.agent import supervise  # imports torch: more than a second

            return supervise(plan, interrupts)
        except Stopped as stopped:
            return stopped.report()
