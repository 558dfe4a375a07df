"""Which process is this, and of how many? Read from the environment variables of the launcher. Imports no torch.

The first of these that describes a world decides:

1. RANK and its companions, written by torchrun and by `paceline run`, or by hand. First, because torchrun also runs
   inside Slurm jobs.
2. Open MPI's OMPI_COMM_WORLD_* and the PMI_* of MPICH and Intel MPI. Before Slurm, because inside a Slurm job mpirun
   starts one helper on each node with srun, and its processes inherit the *helper's* SLURM_* variables.
3. A Slurm step (srun) of several tasks. A batch script or an salloc shell is not a world: it has SLURM_PROCID=0 and
   SLURM_NTASKS=4, but it is one process.
4. Otherwise the process is alone.
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

# How `paceline run` and its workers speak to each other, beside torchrun's variables. Not a way to configure.
LAUNCHER_PID = "PACELINE_LAUNCHER_PID"  # process id of the launcher: a worker ends when the launcher is gone
SETTINGS = "PACELINE_SETTINGS"  # JSON object of the settings given on the command line, such as {"strategy": "ddp"}
THREAD_BUDGET = "PACELINE_THREAD_BUDGET"  # OMP_NUM_THREADS, where the launcher chose it and not the user
ERROR_FILE = "PACELINE_ERROR_FILE"  # where a worker writes the exception that ended it, as JSON
DOCTOR = "PACELINE_DOCTOR"  # JSON object: this run is recorded by `paceline doctor` (doctor/doctor_worker.py)
CELL_FILE = "PACELINE_CELL_FILE"  # where rank 0 writes its progress for the notebook that has called paceline.launch
EXPORT = "PACELINE_EXPORT"  # the module that `paceline export` imports for its model: no run shall start
TRIAL = "PACELINE_TRIAL"  # JSON object: this run is a trial of `paceline compare` or `verify` (trials/spec.py)
# Suffixes of ERROR_FILE. A file of that name is a rank's message to the launcher.
ROLE = ".role"  # what the rank is for the others, in words, where that is not the same for all ranks
LEFT = ".left"  # where in the script the rank is about to end with exit code 0, in words
# The rank is about to end with this exit code, which is not 0, and without an exception. The second line is LOST_PEER
# where the script has caught one that only told of another rank's end.
FAILING = ".failing"
DONE = ".done"  # after LEFT: all exit functions of Python's have run too
BEAT = ".beat"  # how many batches the rank has taken: eight bytes, little-endian, written in place
TRACE = ".trace"  # the file to which the rank's run is traced: an absolute path
KEEPS = ".keeps"  # the rank would hand its state on if another died (state/newest_state.py); WRITING: it does so now
SAVES = ".saves"  # asked to stop, the rank would save a checkpoint, from which the script goes on when started again
CLOSED = ".closed"  # in place of SAVES: the run has ended, well or not, and soon the rank does
WRITES = ".writes"  # a thread of the rank writes a checkpoint, of the step that is the content
SAVED = ".saved"  # the rank was asked to stop, has saved a checkpoint and ended; its path, and how to go on from it
# A file of one byte, which the ranks of a machine read and its launcher writes (state/preemption.py).
STOP_FILE = "PACELINE_STOP_FILE"
# A folder of a machine in which its ranks leave their state for the next start, when another has died.
HANDOVER = "PACELINE_HANDOVER"
# A folder in the memory of this machine, for the checkpoints of state/memory_checkpoints.py; and the steps from one to
# the next. Both are set, or none.
MEMORY, MEMORY_EVERY = "PACELINE_MEMORY", "PACELINE_MEMORY_EVERY"
# Set where the launcher may start the ranks again: after a failure, or with machines that come.
STARTS_AGAIN = "PACELINE_STARTS_AGAIN"
# A port on this machine's loopback, behind which is what torch looks for at MASTER_ADDR:MASTER_PORT (store_place).
STORE_DOOR = "PACELINE_STORE_DOOR"
# Set where SIGTERM to a rank asks the whole run to save and end, as SIGTERM to the launcher does. The rank then passes
# it on to the launcher. Not set: SIGTERM ends the rank.
NOTICE = "PACELINE_NOTICE"
NOTICE_SECONDS = 25.0  # from SIGTERM to SIGKILL, at least: Slurm and Kubernetes give 30 s, systemd 90 s
# The byte of STOP_FILE; 0: nobody has asked the run to stop. END: the launcher ends the ranks, by SIGTERM.
LOOK, DECIDE, END = 1, 2, 3
LOST_PEER = "lost peer"
SHARED_MEMORY = "/dev/shm"  # where Linux has memory as files
WRITING = "writing"  # the content of KEEPS while the rank writes its state; empty before

Environment = Mapping[str, str]

_ALONE = "To run as one process, unset the launcher's variables."
_SET_RIGHT = f"Set them right, or start the script with `paceline run` or torchrun. {_ALONE}"
MOST_PROCESSES = 1_000_000  # of a run. More is a typing error; torch would wait for all of them.


@dataclass(frozen=True)
class World:
    """All processes of a run, seen from one of them.

    Attributes:
        rank: this process's number among all, 0 <= rank < size.
        size: the number of processes.
        local_rank: its number among those on its node.
        local_size: the number of processes on its node.
        node: the number of its machine, 0 <= node < nodes.
        nodes: the number of machines.
        source: who said so: "torchrun", "paceline", "slurm", "openmpi", "mpich", "alone" or "start()".
        master_addr: the host where rank 0 is (or the launcher's store). None where a lone process needs none.
        master_port: the TCP port of the store there. None where a lone process needs none.
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
    """The world that `environ` describes.

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
            f"by itself, beside the others. Set RANK and WORLD_SIZE, or unset LOCAL_RANK."
        )
    return world or World(0, 1, 0, 1, 0, 1, "alone")


class Served(SystemExit):
    """Ends a process that has served the others. No error: the exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


RESUMABLE = 75
"""The exit code where a checkpoint was saved and the run is not done: EX_TEMPFAIL of sysexits.h, which asks the user to
try again."""


class Preempted(SystemExit):
    """Ends a process that was asked to stop and has saved a checkpoint.

    Args:
        told: has the launcher heard of it? Then the exit code is 0, and the launcher's says that the run is not done.
            Otherwise the process's own exit code says it.
    """

    def __init__(self, told: bool = True) -> None:
        super().__init__(0 if told else RESUMABLE)


def tell_launcher(environ: Environment, what: str, text: str = "") -> bool:
    """Leave a message for the launcher, in a file that only this user can read. Other launchers do not read it.

    A disk that is full or broken ends no run: the message then goes into memory, and where that fails too, it is lost.

    Args:
        what: ROLE, LEFT, FAILING, DONE, TRACE, KEEPS, SAVES, CLOSED, WRITES, SAVED, or "" for the record of an
            exception.
        text: the content of the file.

    Returns:
        Whether the launcher can read it.
    """
    path = environ.get(ERROR_FILE)
    return bool(path) and any(_leave(place + what, text) for place in _places(str(path), make=True))


def take_back(environ: Environment, what: str) -> None:
    """Remove a message of `tell_launcher`, if it is there."""
    path = environ.get(ERROR_FILE)
    for place in _places(path) if path else ():
        with contextlib.suppress(OSError):
            os.remove(place + what)


def where_told(error_file: str, what: str) -> Iterator[str]:
    """The files in which the rank that has this error file has left this message."""
    return (place + what for place in _places(error_file) if os.path.exists(place + what))


def was_told(error_file: str, what: str) -> bool:
    """Has the rank that has this error file told its launcher this?"""
    return any(where_told(error_file, what))


def told_by_all(error_files: Iterable[str], *messages: str) -> bool:
    """Has each rank, of those that have these error files, told its launcher one of these messages?"""
    return all(any(was_told(path, what) for what in messages) for path in error_files)


def told(error_file: str, what: str) -> str | None:
    """What the rank that has this error file has told its launcher; None: nothing."""
    for path in where_told(error_file, what):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            return file.read()
    return None


def _leave(path: str, text: str) -> bool:
    """Write a file, whole or not at all."""
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
    """Where messages of a rank may be: beside its error file, or else in a folder of the same name in memory.

    make: make that folder. The launcher removes it with the other (launcher/output.py).
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
    """Is it a folder that only this user can use? In SHARED_MEMORY any user may have made one of a name."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def read_beat(path: str) -> int:
    """The content of a file as BEAT names it; 0 where there is none yet."""
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0


FAILED_SECONDS = 10.0
"""How long a process that an error ends may wait for the others at its exit."""


@contextlib.contextmanager
def ends_if_failed() -> Iterator[None]:
    """Around what may wait for other processes while this one exits. Where an uncaught exception is why it exits, it
    ends after FAILED_SECONDS in the block, with exit code 1.

    By faulthandler, whose thread is none of Python's: the wait may be in C++, and Python's threads may be gone.
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


# ---------------------------------------------------------------- torchrun, paceline run, and by hand


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
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} do not say on "
            f"which node this process is. Set GROUP_RANK to the number of this machine, counted from 0."
        )
    least_nodes = -(-size // local_size)
    nodes = _number(environ, "GROUP_WORLD_SIZE", least=1) if "GROUP_WORLD_SIZE" in environ else least_nodes
    addr, port = _master(environ, size)
    source = "paceline" if LAUNCHER_PID in environ else "torchrun"
    world = World(rank, size, local_rank, local_size, node, nodes, source, addr, port)
    return _consistent(world, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))


def local_place(environ: Environment, rank: int, size: int) -> tuple[int, int]:
    """(local rank, local size) as the environment gives them, or else these. Raises WorldError."""
    rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    size = _number(environ, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in environ else size
    _check_rank(("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size))
    return rank, size


def _local_place(environ: Environment, given: list[str], rank: int, size: int) -> tuple[int, int]:
    """(local rank, local size). Older launchers, and people, set only RANK, WORLD_SIZE and MASTER_*."""
    if len(given) == 2:
        return _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE", least=1)
    if size == 1 or is_loopback(environ.get("MASTER_ADDR", "")):  # one machine
        place = (rank, size)
    elif not given:  # one process on each machine, as Kubernetes' PyTorchJob starts them
        several = environ.get("PET_NPROC_PER_NODE", "")
        if several.isdecimal() and int(several) > 1:
            raise WorldError(
                f"PET_NPROC_PER_NODE={several}, and LOCAL_RANK is not set: the PyTorchJob counts {several} processes "
                f"in each pod, and this one is alone. Start the script with `paceline run train.py` or torchrun, which "
                f"start that many, or set the job's nprocPerNode to 1."
            )
        place = (0, 1)
    else:
        missing = "LOCAL_WORLD_SIZE" if given == ["LOCAL_RANK"] else "LOCAL_RANK"
        raise WorldError(
            f"{given[0]}={environ[given[0]]} is set, but {missing} is not. Set both (this process's number on its "
            f"machine, and how many run there), or start the script with torchrun, which does."
        )
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), place, strict=True):
        if name in given and _number(environ, name) != value:
            raise WorldError(
                f"{name}={environ[name]} contradicts RANK={rank} and WORLD_SIZE={size}, all on this machine "
                f"(MASTER_ADDR={environ.get('MASTER_ADDR', '')!r}): it would be {value}. Correct it, or set both "
                f"LOCAL_RANK and LOCAL_WORLD_SIZE."
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
        return None  # srun --mpi=pmi2 sets PMI_RANK as well; Slurm's own variables say more
    return _mpi(environ, names, "mpich", None, 29500)  # 29500: torch's default; nothing here names the job


def _mpi(environ: Environment, names: tuple[str, str, str, str], source: str, nodes: int | None, port: int) -> World:
    """The world by MPI's variables. Raises WorldError where its ranks are not laid out evenly over the nodes.

    Args:
        names: the variables for rank, size, local rank and local size.
        nodes: the number of nodes, where it is known.
    """
    rank, local_rank = _number(environ, names[0], why="mpirun runs"), _number(environ, names[2], why="mpirun runs")
    size = _number(environ, names[1], least=1, why="mpirun runs")
    local_size = _number(environ, names[3], least=1, why="mpirun runs")
    _check_rank((names[0], rank), (names[1], size))
    _check_rank((names[2], local_rank), (names[3], local_size))
    # MPI tells nobody the number of its node. With as many ranks on each node, one node after another, it follows.
    if size % local_size or rank % local_size != local_rank or nodes not in (None, size // local_size):
        raise WorldError(
            f"{names[0]}={rank}, {names[1]}={size}, {names[2]}={local_rank} and {names[3]}={local_size}: the ranks are "
            f"not laid out evenly, one node after another. Start as many on each node, and in order (Open MPI: "
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
    """Is this a task of an srun step? (The batch script and the shell of salloc have no step id.)"""
    return "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ)


def _slurm(environ: Environment) -> World | None:
    if not _slurm_step(environ):
        return None
    # In the shell of a newer salloc, itself a step of one task, SLURM_NTASKS is the number of the whole job.
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
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} is {sum(tasks)} tasks on {len(tasks)} "
            f"nodes, but {size_name}={size}, {nodes_name}={nodes} and SLURM_NODEID={node}. Do not set Slurm's "
            f"variables by hand; start the script with srun."
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
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
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
    """Slurm's short form of host names, written out: "gpu[07-09,12],login" is gpu07, gpu08, gpu09, gpu12, login."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        choices: list[list[str]] = []
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            choices.append([literal] if literal else [number for part in ranges.split(",") for number in _range(part)])
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    if not hosts or any(not host for host in hosts):
        raise WorldError(f"SLURM_STEP_NODELIST={text!r} names no host. Set MASTER_ADDR to the host of rank 0.")
    return hosts


def _range(text: str) -> list[str]:
    """ "07-09" as 07, 08, 09: leading zeros stay."""
    first, dash, last = text.strip().partition("-")
    if not dash:
        return [first]
    if not (first.isdigit() and last.isdigit()):
        raise WorldError(f"SLURM_STEP_NODELIST has a range {text!r}. Set MASTER_ADDR to the host of rank 0.")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


# ---------------------------------------------------------------- reading and checking


def _text(environ: Environment, name: str, why: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise WorldError(f"{name} is not set, but {why}. Set it, or start the script with a launcher. {_ALONE}")
    return text


def _number(environ: Environment, name: str, *, least: int = 0, why: str = "others of its family are") -> int:
    """The whole number in variable `name`, at least `least`. why: ends the sentence "it is not set, but ..."."""
    text = _text(environ, name, why)
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < least:
        raise WorldError(f"{name}={text!r} is not a whole number of at least {least}. Correct it. {_ALONE}")
    return int(text)


def _master(
    environ: Environment, size: int, addr: str | None = None, port: int | None = None
) -> tuple[str | None, int | None]:
    """(MASTER_ADDR, MASTER_PORT) where they are set, or else the given ones. Several processes need both."""
    addr = environ.get("MASTER_ADDR") or addr
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT", least=1)
        if port > 65535:
            raise WorldError(f"MASTER_PORT={port} is no TCP port. Set one from 1024 to 65535 that is free.")
    for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)):
        if value is None and size > 1:
            raise WorldError(
                f"{name} is not set, and this is one of {size} processes. Set MASTER_ADDR to the host of rank 0 and "
                f"MASTER_PORT to a free port there, alike for all (Open MPI: `mpirun -x {name}=...`), or start the "
                f"script with `paceline run` or torchrun. {_ALONE}"
            )
    return addr, port


def _port(job: str) -> int:
    """A port that all processes of a job agree on and that two jobs rarely share.

    From 15000 to 29399: above the well-known ports, below torch's usual 29400 and 29500, and below the range from
    which Linux takes ports for outgoing connections (32768 and up).
    """
    return 15000 + zlib.crc32(job.encode()) % 14400


def store_place(host: str, port: int, environ: Environment = os.environ) -> tuple[str, int]:
    """Where to connect for a store at this place: the launcher's, at MASTER_ADDR:MASTER_PORT, may have a door on this
    machine's loopback."""
    door = environ.get(STORE_DOOR)
    launchers = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return ("127.0.0.1", int(door)) if door and (host, str(port)) == launchers else (host, port)


def is_loopback(addr: str) -> bool:
    """Is it this machine's loopback address?"""
    return addr in ("localhost", "::1") or addr.startswith("127.")


def _check_rank(rank: tuple[str, int], size: tuple[str, int]) -> None:
    """Raises WorldError for a rank that the world does not have, and for more processes than any cluster runs.

    Args:
        rank, size: each the variable's name and its value.
    """
    problem = None
    if size[1] > MOST_PROCESSES:
        problem = f"{size[0]}={size[1]} is more than the {MOST_PROCESSES:,} processes that a run may have"
    elif rank[1] >= size[1]:
        problem = f"{rank[0]}={rank[1]} is not below {size[0]}={size[1]}"
    if problem:
        raise WorldError(f"{problem}. {_SET_RIGHT}")


def _consistent(world: World, names: tuple[str, ...]) -> World:
    """`world`, if its numbers are consistent. names: the variables of rank, size, local rank, local size and node."""
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
    """The model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
