"""Supervise a run, from the rendezvous to the last message. Loads torch."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from paceline.errors import printable
from paceline.launcher.agent import Agent
from paceline.launcher.checks import check_devices, device_count
from paceline.launcher.early_start import EarlyWorkers
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import Output, say
from paceline.launcher.peers import RendezvousLost
from paceline.launcher.plan import Plan
from paceline.launcher.rendezvous import JOIN_SECONDS, make_rendezvous
from paceline.launcher.torch_import import variable
from paceline.world import RESUMABLE


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int  # the launcher's
    report: str  # the report of the failure, ending in a newline, if the exit code is not 0
    refused: bool = False  # the script refused its arguments on all ranks that ended
    saved: bool = False  # the run was asked to stop, and has saved a checkpoint

    def __post_init__(self) -> None:
        object.__setattr__(self, "report", printable(self.report))  # it contains text from ranks and other machines


def supervise(plan: Plan, interrupts: Interrupts, output: Output, early: EarlyWorkers | None = None) -> Outcome:
    """Run `plan` until it finishes.

    Args:
        early: the run's first workers, if they run already. If this function raises, the caller must end them.

    Raises:
        Stopped: a signal ended the run; no worker is left.
        LaunchError: a worker could not be started, or the rendezvous failed.
    """
    check_devices(plan.nproc, plan.device, device_count(), plan.on_cpu)
    former: Agent | None = None
    while True:
        spec = WorkerSpec(
            role="default",
            local_world_size=plan.nproc,
            entrypoint=os.path.basename(plan.script),
            rdzv_handler=make_rendezvous(plan.nodes, early),  # type: ignore[arg-type]  # it forwards the other methods
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_seconds,
        )
        agent = Agent(spec, plan, output, interrupts, early)
        if former is not None:
            agent.follow(former)
        close = True
        try:
            # Each round of c10d's rendezvous must publish its store's address again. Otherwise machines of an earlier
            # round publish nothing for machines that join later (torch 2.13). Our agent opens another store for the
            # workers anyway.
            with variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
                agent.run()
            break
        except Stopped as stopped:
            close = not plan.nodes.several  # other machines may continue, and need an open rendezvous
            interrupts.deferred = True
            with contextlib.suppress(RendezvousLost):
                agent.leave(f"its launcher was stopped by {signal.Signals(stopped.signum).name}")
            raise
        except RendezvousLost as lost:
            close = False
            if not agent.restarts_without_host():
                return Outcome(agent.exit_code or 1, agent.report + f"{lost}\n")
            say(f"{agent.report}{lost}\n")
        except RendezvousClosedError:  # closed by the machines of the run when they finished
            close = False
            return Outcome(
                agent.exit_code or 1,
                f"{agent.report}The run at {plan.nodes.endpoint} has ended, and accepts no more machines.\n",
            )
        except (RendezvousError, DistError) as error:
            close = False
            why = _in_words(error, plan)
            if not (isinstance(error, RendezvousConnectionError) and agent.restarts_without_host()):
                hint = "Has the run there ended? If not, do " if isinstance(error, RendezvousConnectionError) else "Do "
                hint += f"{plan.nodes.min_nodes} machines run the same command, and can they reach "
                hint += f"{plan.nodes.endpoint}?"
                return Outcome(agent.exit_code or 1, f"{agent.report}The rendezvous failed ({why}). {hint}\n")
            say(f"{agent.report}Lost the launcher of the rendezvous host at {plan.nodes.endpoint}.\n")
        finally:
            if close:
                spec.rdzv_handler.shutdown()
        # The rendezvous host's launcher has ended. If Kubernetes or the user restarts it, it hosts a new rendezvous.
        with contextlib.suppress(Exception):  # it cannot report to the lost rendezvous that this machine leaves
            spec.rdzv_handler.shutdown()
        interrupts.deferred = False
        interrupts.check()
        say(
            f"paceline: restart {agent.restarts_used} of {plan.max_restarts}, as soon as the launcher at "
            f"{plan.nodes.endpoint} runs again. All machines connect to it.\n"
        )
        former, early = agent, None
    if agent.exit_code == 0 and agent.saved is not None:
        asked = "a signal on another machine" if interrupts.asked is None else signal.Signals(interrupts.asked).name
        text = f"paceline: stopped by {asked}, after saving {agent.saved}.\n"
        return Outcome(RESUMABLE, text if agent.leads else "", saved=True)
    return Outcome(agent.exit_code, agent.report, agent.refused)


def _in_words(error: Exception, plan: Plan) -> str:
    """Explain why the rendezvous failed. torch's exceptions often have no message, or only wrap another exception."""
    if isinstance(error, RendezvousTimeoutError):
        seconds = float(plan.nodes.conf.get("join_timeout", JOIN_SECONDS))
        return f"fewer than {plan.nodes.min_nodes} machines had joined after {seconds:g} s"
    link: BaseException | None = error
    while link is not None:
        words = str(link).splitlines()[:1]
        if words and words[0]:
            return f"{type(link).__name__}: {words[0]}"
        link = link.__cause__ or link.__context__
    return type(error).__name__
