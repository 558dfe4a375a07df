"""World: rank and world size of this process, read from the launcher's environment variables. Does not import torch.

The sources, in order. The first that is set wins:

1. RANK and related variables, set by torchrun, by `paceline run` or by the user. These come first because torchrun
   also runs inside Slurm jobs.
2. OMPI_COMM_WORLD_* (Open MPI) and PMI_* (MPICH, Intel MPI). These come before Slurm because inside a Slurm job,
   mpirun starts one helper per node with srun, and its processes inherit the *helper's* SLURM_* variables.
3. A Slurm step (srun) of several tasks. A batch script or an salloc shell is one process, although it has
   SLURM_PROCID=0 and SLURM_NTASKS=4.
4. Otherwise the world is this one process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import platform
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import WorldError

# How `paceline run` and its workers communicate, in addition to torchrun's variables. These are not user settings.
LAUNCHER_PID = "PACELINE_LAUNCHER_PID"  # process id of the launcher: a worker ends when the launcher has ended
SETTINGS = "PACELINE_SETTINGS"  # JSON object of the settings given on the command line, such as {"strategy": "ddp"}
THREAD_BUDGET = "PACELINE_THREAD_BUDGET"  # OMP_NUM_THREADS, if the launcher chose it and not the user
ERROR_FILE = "PACELINE_ERROR_FILE"  # the file for the exception that ended a worker, as JSON
DOCTOR = "PACELINE_DOCTOR"  # JSON object: this run is recorded by `paceline doctor` (doctor/doctor_worker.py)
CELL_FILE = "PACELINE_CELL_FILE"  # the file for rank 0's progress, for the notebook that called paceline.launch
EXPORT = "PACELINE_EXPORT"  # the module that `paceline export` imports for its model: must not start a run
TRIAL = "PACELINE_TRIAL"  # JSON object: this run is a trial of `paceline compare` or `verify` (trials/spec.py)
# Suffixes of ERROR_FILE. A file with one of these suffixes is a message from a rank to the launcher.
ROLE = ".role"  # the rank's role, such as parameter server, if roles differ between ranks
LEFT = ".left"  # the rank is about to end with exit code 0; the content names the script's line
# The rank is about to end with a nonzero exit code, without an exception. The first line of the content is the exit
# code. The second line is LOST_PEER if the script caught an exception that only reported the loss of another rank.
FAILING = ".failing"
DONE = ".done"  # after LEFT: all of Python's exit functions have finished too
BEAT = ".beat"  # number of batches that the rank has started: eight bytes, little-endian, written in place
TRACE = ".trace"  # absolute path of the file to which the rank's run is traced
KEEPS = ".keeps"  # the rank can save its state if another rank dies (state/newest_state.py); WRITING: it is saving now
SAVES = ".saves"  # if asked to stop, the rank will save a checkpoint that the script can resume from
CLOSED = ".closed"  # replaces SAVES: the run is closed, and the rank will end soon
WRITES = ".writes"  # a thread of the rank is writing the checkpoint of this step
SAVED = ".saved"  # the rank saved a checkpoint on request and ended; the content: its path, and how to resume
# A file of one byte that the launcher of a machine writes and its ranks read (state/preemption.py).
STOP_FILE = "PACELINE_STOP_FILE"
# A folder in which the ranks of a machine leave their state for the restart, after another rank died.
HANDOVER = "PACELINE_HANDOVER"
# A folder in this machine's memory for in-memory checkpoints (state/memory_checkpoints.py), and the number of steps
# between two of them. Either both are set or neither.
MEMORY, MEMORY_EVERY = "PACELINE_MEMORY", "PACELINE_MEMORY_EVERY"
# Set if the launcher may restart the ranks: after a failure, or when machines join.
STARTS_AGAIN = "PACELINE_STARTS_AGAIN"
# A port on this machine's loopback that forwards to torch's store at MASTER_ADDR:MASTER_PORT (store_address).
STORE_PORT = "PACELINE_STORE_PORT"
# Set if SIGTERM to a rank asks the whole run to save and stop, as SIGTERM to the launcher does. The rank then forwards
# the signal to the launcher. If the variable is not set, SIGTERM ends the rank.
NOTICE = "PACELINE_NOTICE"
NOTICE_SECONDS = 25.0  # at least this long from SIGTERM to SIGKILL: Slurm and Kubernetes give 30 s, systemd 90 s
# The byte of STOP_FILE. 0: the run was not asked to stop. LOOK: each rank checks the launcher's store after every step.
# DECIDE: rank 0 chooses the last step. END: the launcher ends the ranks with SIGTERM.
LOOK, DECIDE, END = 1, 2, 3
LOST_PEER = "lost peer"
SHARED_MEMORY = "/dev/shm"  # Linux's file system in memory
WRITING = "writing"  # the content of KEEPS while the rank writes its state; empty before

Environment = Mapping[str, str]

_ALONE = "To run as one process, unset the launcher's variables."
_SET_RIGHT = f"Correct them, or start the script with `paceline run` or torchrun. {_ALONE}"
MOST_PROCESSES = 1_000_000  # a larger world size must be a typing error, and torch would wait for all processes


@dataclass(frozen=True)
class World:
    """The position of one process among all processes of a run.

    Attributes:
        rank: this process's number, 0 <= rank < size.
        size: the number of processes.
        local_rank: this process's number on its node, 0 <= local_rank < local_size.
        local_size: the number of processes on this node.
        node: this machine's number, 0 <= node < nodes.
        nodes: the number of machines.
        source: "torchrun", "paceline", "slurm", "openmpi", "mpich", "alone" or "start()".
        master_addr: the host of rank 0 (or of the launcher's store). May be None for a single process.
        master_port: the TCP port of the store on that host. May be None for a single process.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    source: str
    master_addr: str | None = None
    master_port: int | None = None


def from_env(environ: Environment) -> World:
    """Read the world from environment variables.

    Raises:
        WorldError: a variable is missing, not a whole number, or contradicts another.
    """
    if "RANK" in environ:
        return _torchrun(environ)
    world = _open_mpi(environ) or _mpich(environ) or _slurm(environ)
    if environ.get("WORLD_SIZE"):
        size = _number(environ, "WORLD_SIZE", least=1)
        if size != (world.size if world else 1):
            found = f"{world.source} started {world.size} processes" if world else "RANK is not set"
            raise WorldError(f"WORLD_SIZE={size} is set, but {found}. Set RANK too, or unset WORLD_SIZE.")
    if world is None and environ.get("LOCAL_RANK") and _number(environ, "LOCAL_RANK") > 0:
        raise WorldError(
            f"LOCAL_RANK={environ['LOCAL_RANK']} is set, but RANK and WORLD_SIZE are not: this process would train "
            f"a separate model. Set RANK and WORLD_SIZE, or unset LOCAL_RANK."
        )
    return world or World(0, 1, 0, 1, 0, 1, "alone")


class Served(SystemExit):
    """Ends a process that only served other ranks, such as a parameter server. The exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


RESUMABLE = 75
"""The exit code of a run that stopped early after saving a checkpoint: EX_TEMPFAIL of sysexits.h ("try again")."""


class Preempted(SystemExit):
    """Ends a process that was asked to stop and has saved a checkpoint.

    Args:
        reported: whether the launcher knows about the checkpoint. If so, this process exits with 0 and the launcher
            exits with RESUMABLE. Otherwise this process exits with RESUMABLE.
    """

    def __init__(self, reported: bool = True) -> None:
        super().__init__(0 if reported else RESUMABLE)


def send_to_launcher(environ: Environment, what: str, text: str = "") -> bool:
    """Send a message to the launcher, through a file that only this user can read.

    A full or broken disk does not end the run: the message is then stored in memory. If that fails too, it is lost.

    Args:
        what: ROLE, LEFT, FAILING, DONE, TRACE, KEEPS, SAVES, CLOSED, WRITES, SAVED, or "" for the record of an
            exception.
        text: the content of the file.

    Returns:
        Whether the message was stored. False under other launchers.
    """
    path = environ.get(ERROR_FILE)
    return bool(path) and any(_leave(place + what, text) for place in _places(str(path), make=True))


def withdraw(environ: Environment, what: str) -> None:
    """Remove a message of `send_to_launcher`, if it exists."""
    path = environ.get(ERROR_FILE)
    for place in _places(path) if path else ():
        with contextlib.suppress(OSError):
            os.remove(place + what)


def message_files(error_file: str, what: str) -> Iterator[str]:
    """Find the files that contain message `what` of the rank with this error file."""
    return (place + what for place in _places(error_file) if os.path.exists(place + what))


def was_sent(error_file: str, what: str) -> bool:
    """Return whether the rank with this error file has sent message `what`."""
    return any(message_files(error_file, what))


def reported_by_all(error_files: Iterable[str], *messages: str) -> bool:
    """Return whether each rank, given by its error file, has sent at least one of these messages."""
    return all(any(was_sent(path, what) for what in messages) for path in error_files)


def read_message(error_file: str, what: str) -> str | None:
    """Return the text of message `what` of the rank with this error file, or None if it was not sent."""
    for path in message_files(error_file, what):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            return file.read()
    return None


def _leave(path: str, text: str) -> bool:
    """Write a file atomically. Return whether it succeeded."""
    part = path + ".part"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", errors="replace") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(part)
        return False
    return True


def _places(error_file: str, make: bool = False) -> Iterator[str]:
    """Yield the base paths of a rank's messages (without suffix): its error file, then the same path in memory.

    make: create the folder in memory. The launcher removes it with the other folder (launcher/output.py).
    """
    yield error_file
    folder, name = os.path.split(error_file)
    spare = os.path.join(SHARED_MEMORY, os.path.basename(folder))
    with contextlib.suppress(OSError):
        if make and os.path.isdir(SHARED_MEMORY):
            with contextlib.suppress(FileExistsError):
                os.mkdir(spare, mode=0o700)
        if is_private(spare):
            yield os.path.join(spare, name)


def is_private(folder: str) -> bool:
    """Return whether only this user can access the folder. In SHARED_MEMORY, any user can create any name."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def read_beat(path: str) -> int:
    """Read the number of batches from a BEAT file; 0 if it does not exist yet."""
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0


FAILED_SECONDS = 10.0
"""Seconds that a failed process may wait for other processes at exit."""


@contextlib.contextmanager
def ends_if_failed() -> Iterator[None]:
    """In this block, limit the time that a failed process waits for other processes at exit.

    If an uncaught exception is ending this process, it exits with code 1 after FAILED_SECONDS in the block. This uses
    faulthandler's native thread: the wait may be in C++, and Python's threads may have ended.
    """
    if getattr(sys, "last_value", None) is None:
        yield
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or no file
            stream.flush()
    with open(os.devnull, "w") as sink:
        faulthandler.dump_traceback_later(FAILED_SECONDS, exit=True, file=sink)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- torchrun, paceline run, and set by the user


def _torchrun(environ: Environment) -> World:
    rank = _number(environ, "RANK")
    size = _number(environ, "WORLD_SIZE", least=1, why="RANK is")
    _check_rank(("RANK", rank), ("WORLD_SIZE", size))
    given = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if environ.get(name)]
    if not given:
        step = _slurm(environ)  # srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python train.py'
        if step is not None and (step.rank, step.size) == (rank, size):
            return step
    local_rank, local_size = _local_place(environ, given, rank, size)
    _check_rank(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_size))
    block = size % local_size == 0 and rank % local_size == local_rank  # ranks 0..n-1 on node 0, and so on
    if "GROUP_RANK" in environ or block:
        node = _number(environ, "GROUP_RANK") if "GROUP_RANK" in environ else rank // local_size
    else:
        raise WorldError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} do not "
            f"identify this process's node. Set GROUP_RANK to the number of this machine, counted from 0."
        )
    least_nodes = -(-size // local_size)
    nodes = _number(environ, "GROUP_WORLD_SIZE", least=1) if "GROUP_WORLD_SIZE" in environ else least_nodes
    addr, port = _master(environ, size)
    source = "paceline" if LAUNCHER_PID in environ else "torchrun"
    world = World(rank, size, local_rank, local_size, node, nodes, source, addr, port)
    return _consistent(world, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))


def local_place(environ: Environment, rank: int, size: int) -> tuple[int, int]:
    """Return (local rank, local size) from the environment, or the given values if not set. Raises WorldError."""
    rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    size = _number(environ, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in environ else size
    _check_rank(("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size))
    return rank, size


def _local_place(environ: Environment, given: list[str], rank: int, size: int) -> tuple[int, int]:
    """Return (local rank, local size), inferred if not both are set.

    Older launchers, and people, set only RANK, WORLD_SIZE and MASTER_*.

    Args:
        given: which of LOCAL_RANK and LOCAL_WORLD_SIZE are set.
    """
    if len(given) == 2:
        return _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE", least=1)
    if size == 1 or is_loopback(environ.get("MASTER_ADDR", "")):  # one machine
        place = (rank, size)
    elif not given:  # one process on each machine, as Kubernetes' PyTorchJob starts them
        several = environ.get("PET_NPROC_PER_NODE", "")
        if several.isdecimal() and int(several) > 1:
            raise WorldError(
                f"PET_NPROC_PER_NODE={several}, but LOCAL_RANK is not set: the PyTorchJob expects {several} processes "
                f"in each pod, but only this one was started. Start the script with `paceline run train.py` or "
                f"torchrun, which start {several}, or set the job's nprocPerNode to 1."
            )
        place = (0, 1)
    else:
        missing = "LOCAL_WORLD_SIZE" if given == ["LOCAL_RANK"] else "LOCAL_RANK"
        raise WorldError(
            f"{given[0]}={environ[given[0]]} is set, but {missing} is not. Set both (this process's number on its "
            f"machine, and the number of processes there), or start the script with torchrun, which sets them."
        )
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), place, strict=True):
        if name in given and _number(environ, name) != value:
            raise WorldError(
                f"{name}={environ[name]} contradicts RANK={rank} and WORLD_SIZE={size}. All processes are on this "
                f"machine (MASTER_ADDR={environ.get('MASTER_ADDR', '')!r}), so it should be {value}. Correct it, or "
                f"set both LOCAL_RANK and LOCAL_WORLD_SIZE."
            )
    return place


# ---------------------------------------------------------------- MPI


def _open_mpi(environ: Environment) -> World | None:
    prefix = "OMPI_COMM_WORLD_"
    names = (prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
    if not any(name in environ for name in names[:2]):
        return None
    nodes_name = "OMPI_MCA_orte_num_nodes"  # Open MPI 4; 5 has no such variable
    nodes = _number(environ, nodes_name, least=1) if environ.get(nodes_name) else None
    job = environ.get("PMIX_NAMESPACE", "")  # different for each mpirun
    return _mpi(environ, names, "openmpi", nodes, _port(job) if job else 29500)


def _mpich(environ: Environment) -> World | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if not any(name in environ for name in names[:2]):
        return None
    if "MPI_LOCALRANKID" not in environ and _slurm_step(environ):
        return None  # srun --mpi=pmi2 sets PMI_RANK as well, but Slurm's variables contain more
    return _mpi(environ, names, "mpich", None, 29500)  # 29500 is torch's default: no variable here names the job


def _mpi(environ: Environment, names: tuple[str, str, str, str], source: str, nodes: int | None, port: int) -> World:
    """Read the world from MPI's variables. Raises WorldError if the ranks are not distributed evenly over the nodes.

    Args:
        names: the variables for rank, size, local rank and local size.
        nodes: the number of nodes, if known.
    """
    why = "mpirun started this process"
    rank, local_rank = _number(environ, names[0], why=why), _number(environ, names[2], why=why)
    size = _number(environ, names[1], least=1, why=why)
    local_size = _number(environ, names[3], least=1, why=why)
    _check_rank((names[0], rank), (names[1], size))
    _check_rank((names[2], local_rank), (names[3], local_size))
    # MPI does not set the node's number. If every node has the same number of consecutive ranks, we can compute it.
    if size % local_size or rank % local_size != local_rank or nodes not in (None, size // local_size):
        raise WorldError(
            f"{names[0]}={rank}, {names[1]}={size}, {names[2]}={local_rank} and {names[3]}={local_size}: the ranks are "
            f"not distributed evenly, one node after another. Start the same number on each node, in order (Open MPI: "
            f"`mpirun --map-by slot`), or use torchrun."
        )
    place = (rank // local_size, size // local_size)
    if place[1] == 1:
        addr, master_port = _master(environ, size, "127.0.0.1", port)
    else:
        addr, master_port = _master(environ, size)
    world = World(rank, size, local_rank, local_size, *place, source, addr, master_port)
    return _consistent(world, names)


# ---------------------------------------------------------------- Slurm


def _slurm_step(environ: Environment) -> bool:
    """Return whether this process is a task of an srun step. (Batch scripts and salloc shells have no step id.)"""
    return "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ)


def _slurm(environ: Environment) -> World | None:
    if not _slurm_step(environ):
        return None
    # The shell of a newer salloc is itself a step with one task, but SLURM_NTASKS counts the tasks of the whole job.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _number(environ, size_name, least=1, why="SLURM_PROCID is")
    if size == 1:
        return None
    why = "SLURM_PROCID is"
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", why=why)
    _check_rank(("SLURM_PROCID", rank), (size_name, size))
    node = _number(environ, "SLURM_NODEID", why=why)
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    nodes = _number(environ, nodes_name, least=1, why=why)
    tasks = _tasks_per_node(environ, why)
    if sum(tasks) != size or len(tasks) != nodes or node >= nodes:
        raise WorldError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} means {sum(tasks)} tasks on "
            f"{len(tasks)} nodes, but {size_name}={size}, {nodes_name}={nodes} and SLURM_NODEID={node}. Start the "
            f"script with srun, and do not set Slurm's variables yourself."
        )
    if nodes == 1:
        host = "127.0.0.1"
    else:
        host = expand_hosts(_text(environ, "SLURM_STEP_NODELIST", why))[0]
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
    port = _port(f"{environ.get('SLURM_JOB_ID', '')}.{step}")
    addr, master_port = _master(environ, size, host, port)
    world = World(rank, size, local_rank, tasks[node], node, nodes, "slurm", addr, master_port)
    return _consistent(world, ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"))


def _tasks_per_node(environ: Environment, why: str) -> list[int]:
    """Parse Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _text(environ, name, why)
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(f"{name}={text!r} is not of the form '2(x3),1'. Start the script with srun.")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's host list: "gpu[07-09,12],login" is gpu07, gpu08, gpu09, gpu12, login."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        choices: list[list[str]] = []
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            choices.append([literal] if literal else [number for part in ranges.split(",") for number in _range(part)])
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    if not hosts or any(not host for host in hosts):
        raise WorldError(f"SLURM_STEP_NODELIST={text!r} contains no host name. Set MASTER_ADDR to the host of rank 0.")
    return hosts


def _range(text: str) -> list[str]:
    """Expand "07-09" to 07, 08, 09, with leading zeros."""
    first, dash, last = text.strip().partition("-")
    if not dash:
        return [first]
    if not (first.isdigit() and last.isdigit()):
        raise WorldError(f"SLURM_STEP_NODELIST has an invalid range {text!r}. Set MASTER_ADDR to the host of rank 0.")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


# ---------------------------------------------------------------- reading and checking


def _text(environ: Environment, name: str, why: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise WorldError(f"{name} is not set, but {why}. Set {name}, or start the script with a launcher. {_ALONE}")
    return text


def _number(environ: Environment, name: str, *, least: int = 0, why: str = "related variables are") -> int:
    """Read the whole number in variable `name`, at least `least`.

    Args:
        why: completes the error "NAME is not set, but ...".
    """
    text = _text(environ, name, why)
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < least:
        raise WorldError(f"{name}={text!r} is not a whole number of at least {least}. Correct it. {_ALONE}")
    return int(text)


def _master(
    environ: Environment, size: int, addr: str | None = None, port: int | None = None
) -> tuple[str | None, int | None]:
    """Return (MASTER_ADDR, MASTER_PORT), or the given defaults if not set. Several processes need both."""
    addr = environ.get("MASTER_ADDR") or addr
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT", least=1)
        if port > 65535:
            raise WorldError(f"MASTER_PORT={port} is not a TCP port. Set a free port from 1024 to 65535.")
    for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)):
        if value is None and size > 1:
            raise WorldError(
                f"{name} is not set, and this is one of {size} processes. Set MASTER_ADDR to the host of rank 0 and "
                f"MASTER_PORT to a free port there, the same on all processes (Open MPI: `mpirun -x {name}=...`), or "
                f"start the script with `paceline run` or torchrun. {_ALONE}"
            )
    return addr, port


def _port(job: str) -> int:
    """Compute a port from the job's name: the same for all processes of a job, and rarely the same for two jobs.

    The range is 15000 to 29399: above the well-known ports, below torch's default ports 29400 and 29500, and below
    Linux's ports for outgoing connections (32768 and up).
    """
    return 15000 + zlib.crc32(job.encode()) % 14400


def store_address(host: str, port: int, environ: Environment = os.environ) -> tuple[str, int]:
    """Return the address to connect to for the store at host:port.

    The launcher's store, at MASTER_ADDR:MASTER_PORT, may be forwarded from a port on this machine's loopback.
    """
    forwarded = environ.get(STORE_PORT)
    launchers = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return ("127.0.0.1", int(forwarded)) if forwarded and (host, str(port)) == launchers else (host, port)


def is_loopback(addr: str) -> bool:
    """Return whether addr is a loopback address."""
    return addr in ("localhost", "::1") or addr.startswith("127.")


def _check_rank(rank: tuple[str, int], size: tuple[str, int]) -> None:
    """Raise WorldError if the rank is not below the size, or the size is absurdly large.

    Args:
        rank, size: (name of the variable, value).
    """
    problem = None
    if size[1] > MOST_PROCESSES:
        problem = f"{size[0]}={size[1]} is above the limit of {MOST_PROCESSES:,} processes"
    elif rank[1] >= size[1]:
        problem = f"{rank[0]}={rank[1]} is not below {size[0]}={size[1]}"
    if problem:
        raise WorldError(f"{problem}. {_SET_RIGHT}")


def _consistent(world: World, names: tuple[str, ...]) -> World:
    """Return `world` if its numbers are consistent, else raise WorldError.

    Args:
        names: the variables for rank, size, local rank, local size and node.
    """
    rank, size, local_rank, local_size = names[:4]
    _check_rank((rank, world.rank), (size, world.size))
    _check_rank((local_rank, world.local_rank), (local_size, world.local_size))
    problem = None
    if world.local_size > world.size:
        problem = f"{local_size}={world.local_size} is more than {size}={world.size}"
    elif world.local_rank > world.rank:
        problem = f"{local_rank}={world.local_rank} is more than {rank}={world.rank}"
    elif world.node >= world.nodes:
        problem = f"{names[4]}={world.node} is not below the number of nodes, {world.nodes}"
    elif world.nodes > world.size - world.local_size + 1:
        problem = f"{size}={world.size} is too few for {world.nodes} nodes with {local_size}={world.local_size} on one"
    if problem:
        raise WorldError(f"{problem}. {_SET_RIGHT}")
    return world


def processor() -> str:
    """Return the model name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
