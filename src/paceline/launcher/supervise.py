"""A run, from the rendezvous to the last message. Loads torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError

from paceline.launcher.agent import Agent
from paceline.launcher.checks import check_devices
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import Output
from paceline.launcher.peers import RendezvousLost
from paceline.launcher.plan import Plan
from paceline.launcher.rendezvous import make_rendezvous


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int  # the launcher's
    story: str  # what went wrong, ending in a newline, where the exit code is not 0
    refused: bool = False  # did the script refuse its arguments, on all ranks that ended?
    expendable: frozenset[int] = frozenset()  # ranks that were killed, while the others went on


def supervise(plan: Plan, interrupts: Interrupts, output: Output) -> Outcome:
    """Run `plan` to its end.

    Raises:
        Stopped: a signal ended the run; no worker is left.
        LaunchError: a worker could not be started, or the machines did not meet.
    """
    check_devices(plan.nproc, plan.device, device_count(), plan.on_cpu)
    spec = WorkerSpec(
        role="default",
        local_world_size=plan.nproc,
        entrypoint=os.path.basename(plan.script),
        rdzv_handler=make_rendezvous(plan.nodes),
        max_restarts=plan.max_restarts,
        monitor_interval=plan.monitor_seconds,
    )
    agent = Agent(spec, plan, output, interrupts)
    close = True
    try:
        # Each round of c10d's rendezvous must tell anew where its store is. Otherwise a machine that was there before
        # tells nothing to one that comes later (torch 2.13). Our agent gives the workers another store anyway.
        with _set("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
            agent.run()
    except Stopped as stopped:
        close = not plan.nodes.several  # others may go on; closed, the rendezvous would let nobody in
        interrupts.deferred = True
        with contextlib.suppress(RendezvousLost):
            agent.leave(f"its launcher was stopped by {signal.Signals(stopped.signum).name}")
        raise
    except RendezvousLost as lost:
        close = False
        return Outcome(agent.exit_code or 1, agent.story + f"{lost}\n")
    except (RendezvousError, DistError) as error:
        close = False
        why = f"{type(error).__name__}: {error.__cause__ or error!s}".splitlines()[0]
        hint = f"Do {plan.nodes.min_nodes} machines run the same command, and can they reach {plan.nodes.endpoint}?"
        return Outcome(agent.exit_code or 1, f"{agent.story}The machines did not meet ({why}). {hint}\n")
    finally:
        if close:
            spec.rdzv_handler.shutdown()
    return Outcome(agent.exit_code, agent.story, agent.refused, agent.expendable)


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a time."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def device_count() -> int:
    """The number of visible accelerators; 0 where there are none. For CUDA by NVML, which makes no context."""
    if torch.version.cuda or torch.version.hip:
        return torch.cuda.device_count()
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
