"""A run, from the rendezvous to the last message. Loads torch."""

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
from paceline.launcher.rendezvous import MEET_SECONDS, make_rendezvous
from paceline.launcher.torch_import import variable
from paceline.world import RESUMABLE


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int  # the launcher's
    story: str  # what went wrong, ending in a newline, where the exit code is not 0
    refused: bool = False  # did the script refuse its arguments, on all ranks that ended?
    saved: bool = False  # was the run asked to stop, and has saved a checkpoint?

    def __post_init__(self) -> None:
        object.__setattr__(self, "story", printable(self.story))  # words of ranks and of other machines are in it


def supervise(plan: Plan, interrupts: Interrupts, output: Output, early: EarlyWorkers | None = None) -> Outcome:
    """Run `plan` to its end. early: its first workers, if they run already; whoever started them ends them where this
    raises.

    Raises:
        Stopped: a signal ended the run; no worker is left.
        LaunchError: a worker could not be started, or the machines did not meet.
    """
    check_devices(plan.nproc, plan.device, device_count(), plan.on_cpu)
    former: Agent | None = None
    while True:
        spec = WorkerSpec(
            role="default",
            local_world_size=plan.nproc,
            entrypoint=os.path.basename(plan.script),
            rdzv_handler=make_rendezvous(plan.nodes, early),  # type: ignore[arg-type]  # it hands the rest on
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_seconds,
        )
        agent = Agent(spec, plan, output, interrupts, early)
        if former is not None:
            agent.follow(former)
        close = True
        try:
            # Each round of c10d's rendezvous must tell anew where its store is. Otherwise a machine that was there
            # before tells nothing to one that comes later (torch 2.13). Our agent gives the workers another store
            # anyway.
            with variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
                agent.run()
            break
        except Stopped as stopped:
            close = not plan.nodes.several  # others may go on; closed, the rendezvous would let nobody in
            interrupts.deferred = True
            with contextlib.suppress(RendezvousLost):
                agent.leave(f"its launcher was stopped by {signal.Signals(stopped.signum).name}")
            raise
        except RendezvousLost as lost:
            close = False
            if not agent.restarts_without_keeper():
                return Outcome(agent.exit_code or 1, agent.story + f"{lost}\n")
            say(f"{agent.story}{lost}\n")
        except RendezvousClosedError:  # by those that have met, at their end
            close = False
            return Outcome(
                agent.exit_code or 1,
                f"{agent.story}The run that met at {plan.nodes.endpoint} has ended, and takes in no more machines.\n",
            )
        except (RendezvousError, DistError) as error:
            close = False
            why = _in_words(error, plan)
            if not (isinstance(error, RendezvousConnectionError) and agent.restarts_without_keeper()):
                hint = "Has the run there ended? Else: do " if isinstance(error, RendezvousConnectionError) else "Do "
                hint += f"{plan.nodes.min_nodes} machines run the same command, and can they reach "
                hint += f"{plan.nodes.endpoint}?"
                return Outcome(agent.exit_code or 1, f"{agent.story}The machines did not meet ({why}). {hint}\n")
            say(f"{agent.story}The launcher at {plan.nodes.endpoint}, which kept the rendezvous, has gone.\n")
        finally:
            if close:
                spec.rdzv_handler.shutdown()
        # The launcher that kept the rendezvous has gone. Started again, by Kubernetes or by hand, it keeps another.
        with contextlib.suppress(Exception):  # it cannot tell the others that it leaves
            spec.rdzv_handler.shutdown()
        interrupts.deferred = False
        interrupts.check()
        say(
            f"paceline: restart {agent.restarts_used} of {plan.max_restarts}, when the launcher at "
            f"{plan.nodes.endpoint} is there again. All machines that take part meet there.\n"
        )
        former, early = agent, None
    if agent.exit_code == 0 and agent.saved is not None:
        asked = "a signal on another machine" if interrupts.asked is None else signal.Signals(interrupts.asked).name
        text = f"paceline: stopped by {asked}, after saving {agent.saved}.\n"
        return Outcome(RESUMABLE, text if agent.leads else "", saved=True)
    return Outcome(agent.exit_code, agent.story, agent.refused)


def _in_words(error: Exception, plan: Plan) -> str:
    """Why the machines did not meet. torch's exceptions often have no words, or only wrap those of another."""
    if isinstance(error, RendezvousTimeoutError):
        seconds = float(plan.nodes.conf.get("join_timeout", MEET_SECONDS))
        return f"fewer than {plan.nodes.min_nodes} had come after {seconds:g} s"
    link: BaseException | None = error
    while link is not None:
        words = str(link).splitlines()[:1]
        if words and words[0]:
            return f"{type(link).__name__}: {words[0]}"
        link = link.__cause__ or link.__context__
    return type(error).__name__
