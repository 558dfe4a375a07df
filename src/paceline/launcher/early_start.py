"""The first workers of a run on one machine, started before the launcher has loaded torch. Imports no torch.

To load torch takes a second or two, for the launcher as for its workers. On one machine nothing that a worker needs
comes from torch, but for the store, and of that its port, which a bound socket has. So:

1. The launcher binds and listens at the socket, and starts the workers, which load torch too.
2. It loads torch. Workers that are faster find the socket listening; the kernel keeps their connections.
3. The agent (agent.py) makes the store on that socket, and takes the workers for its own first ones.

What torch alone can check comes late then: how many accelerators there are. So this is for machines on which no driver
has left a device file; where that was wrong, the check ends the workers.
"""

from __future__ import annotations

import glob
import os
import socket
import sys
import uuid
from dataclasses import dataclass

from paceline.launcher import processes
from paceline.launcher.checks import HOST, check_devices, listen
from paceline.launcher.output import Output
from paceline.launcher.plan import Plan, available_cores, command_line, worker_environment
from paceline.world import HANDOVER, MEMORY, MEMORY_EVERY, NOTICE, STARTS_AGAIN, STOP_FILE, STORE_DOOR, World

DRIVERS = (  # on Linux: of NVIDIA, of it under WSL, of AMD, of Intel, of others
    "/dev/nvidia*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/render*",
    "/dev/accel*",
    "/dev/davinci*",
    "/dev/hl[0-9]*",
)


@dataclass(frozen=True)
class EarlyWorkers:
    """Workers that run, and where they will look for the store."""

    run_id: str
    listener: socket.socket  # at which the store is to listen; the workers' MASTER_PORT
    processes: processes.Processes


def possible(plan: Plan) -> bool:
    """Whether the workers of this plan need nothing that torch would have to say first."""
    return (
        not plan.nodes.several
        and "torch" not in sys.modules  # else nothing is gained
        and sys.platform == "linux"
        and not any(map(glob.glob, DRIVERS))
    )


def start(plan: Plan, output: Output, stop_file: str | None, notices: bool = False) -> EarlyWorkers:
    """Start the workers. stop_file, notices: as for `command`.

    Raises:
        LaunchError: a worker cannot be started.
    """
    check_devices(plan.nproc, plan.device, 0, plan.on_cpu)
    listener = listen(HOST, plan.nodes.port)
    run_id = uuid.uuid4().hex
    if stop_file is not None and write_stop_file(stop_file, 0):
        stop_file = None  # the agent's StopRequest says why
    port = listener.getsockname()[1]
    commands: list[processes.Command] = []
    try:
        for rank in range(plan.nproc):
            world = World(rank, plan.nproc, rank, plan.nproc, 0, 1, "paceline", HOST, port)
            commands.append(command(plan, world, output, run_id, starts=0, stop_file=stop_file, notices=notices))
        started = processes.start(commands, output.private)
    except BaseException:
        listener.close()
        raise
    finally:
        close_outputs(commands)
    return EarlyWorkers(run_id, listener, started)


def command(
    plan: Plan,
    world: World,
    output: Output,
    run_id: str,
    *,
    starts: int,
    stop_file: str | None,
    notices: bool = False,
    door: int | None = None,
) -> processes.Command:
    """What starts the worker that has this place.

    starts: how often workers have been started before.
    stop_file: through which they are told to save a checkpoint and end; None: they are not.
    notices: may SIGTERM ask for that?
    door: the port on loopback that leads to the workers' store; None: it is at the place itself.
    """
    environ = worker_environment(
        plan,
        world,
        error_file=error_file(output, world.rank, starts),
        run_id=run_id,
        launcher_pid=os.getpid(),
        cores=available_cores(),
        environ=os.environ,
        restarts=starts,
    )
    again = bool(plan.max_restarts)
    set_or_not = {  # None: not set, also where an outer launcher has set it for its own workers
        STOP_FILE: stop_file,
        NOTICE: "1" if notices and stop_file is not None else None,
        HANDOVER: os.path.join(output.private, "newest") if again else None,
        MEMORY: None if plan.memory_every is None else output.memory(),
        MEMORY_EVERY: None if plan.memory_every is None else str(plan.memory_every),
        STARTS_AGAIN: "1" if again or plan.nodes.may_change else None,
        STORE_DOOR: None if door is None else str(door),
    }
    environ = {name: value for name, value in {**environ, **set_or_not}.items() if value is not None}
    return processes.Command(command_line(plan), environ, output.open(world.rank, first=world.local_rank == 0))


def close_outputs(commands: list[processes.Command]) -> None:
    """Close the launcher's own descriptors of the workers' outputs."""
    for one in commands:
        if one.output is not None:
            one.output.close()


def error_file(output: Output, rank: int, starts: int) -> str:
    """Where a worker writes the exception that ends it."""
    return os.path.join(output.private, f"error-{rank}-{starts + 1}.json")


def stop_file(output: Output, starts: int) -> str:
    """Through which the ranks of this machine are told to save a checkpoint and end."""
    return os.path.join(output.private, f"stop-{starts + 1}")


def write_stop_file(path: str, phase: int) -> str:
    """Tell the ranks, which have mapped the file. phase: 0, or one of stop_request.py. Returns why it cannot be
    written, or ""."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:  # in place: it is mapped
            file.write(bytes([phase]))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
