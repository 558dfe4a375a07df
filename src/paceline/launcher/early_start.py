"""Start the first workers of a run on one machine before the launcher has loaded torch. Does not import torch.

Loading torch takes a second or two, in the launcher and in each worker. On one machine, a worker can start as soon as
it knows the port of the store. A listening socket has a port before the store is open. So:

1. The launcher binds a listening socket, and starts the workers, which load torch too.
2. The launcher loads torch. Faster workers can already connect to the socket; the kernel queues their connections.
3. The agent (agent.py) opens the store on that socket, and takes over the workers.

The launcher needs torch to count the accelerators, so it can check their number only after the workers have started.
Workers therefore start early only on machines without device files of accelerator drivers. If the check still fails,
the launcher ends the workers.
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
from paceline.world import HANDOVER, MEMORY, MEMORY_EVERY, NOTICE, STARTS_AGAIN, STOP_FILE, STORE_PORT, World

DRIVERS = (  # on Linux: NVIDIA, NVIDIA under WSL, AMD, Intel, others
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
    """Running workers, and the socket of their store."""

    run_id: str
    listener: socket.socket  # for the store; its port is the workers' MASTER_PORT
    processes: processes.Processes


def possible(plan: Plan) -> bool:
    """Return whether the workers of this plan can start before the launcher has loaded torch."""
    return (
        not plan.nodes.several
        and "torch" not in sys.modules  # otherwise nothing is gained
        and sys.platform == "linux"
        and not any(map(glob.glob, DRIVERS))
    )


def start(plan: Plan, output: Output, stop_file: str | None, notices: bool = False) -> EarlyWorkers:
    """Start the workers.

    Args:
        stop_file, notices: as for `command`.

    Raises:
        LaunchError: a worker cannot be started.
    """
    check_devices(plan.nproc, plan.device, 0, plan.on_cpu)
    listener = listen(HOST, plan.nodes.port)
    run_id = uuid.uuid4().hex
    if stop_file is not None and write_stop_file(stop_file, 0):
        stop_file = None  # the agent's StopRequest reports why
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
    store_port: int | None = None,
) -> processes.Command:
    """Return the command that starts one worker.

    Args:
        starts: the number of earlier starts.
        stop_file: the file through which the launcher asks the workers to save a checkpoint and end; None: it cannot.
        notices: whether SIGTERM may request such a checkpoint.
        store_port: the loopback port that forwards to the workers' store; None: the store is at world.master_port.
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
    set_or_not = {  # None: remove the variable, even if an outer launcher has set it for its workers
        STOP_FILE: stop_file,
        NOTICE: "1" if notices and stop_file is not None else None,
        HANDOVER: os.path.join(output.private, "newest") if again else None,
        MEMORY: None if plan.memory_every is None else output.memory(),
        MEMORY_EVERY: None if plan.memory_every is None else str(plan.memory_every),
        STARTS_AGAIN: "1" if again or plan.nodes.may_change else None,
        STORE_PORT: None if store_port is None else str(store_port),
    }
    environ = {name: value for name, value in {**environ, **set_or_not}.items() if value is not None}
    return processes.Command(command_line(plan), environ, output.open(world.rank, first=world.local_rank == 0))


def close_outputs(commands: list[processes.Command]) -> None:
    """Close the launcher's descriptors of the workers' output files."""
    for one in commands:
        if one.output is not None:
            one.output.close()


def error_file(output: Output, rank: int, starts: int) -> str:
    """Return the path of a worker's error file, for the exception that ended it."""
    return os.path.join(output.private, f"error-{rank}-{starts + 1}.json")


def stop_file(output: Output, starts: int) -> str:
    """Return the path of the stop file, through which the launcher asks its ranks to save a checkpoint and end."""
    return os.path.join(output.private, f"stop-{starts + 1}")


def write_stop_file(path: str, phase: int) -> str:
    """Write a phase to the stop file, which the ranks have mapped. Return "", or the error message of a failed write.

    Args:
        phase: 0, or a phase of stop_request.py.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:  # in place: it is mapped
            file.write(bytes([phase]))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
