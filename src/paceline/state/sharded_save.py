"""Collective work on one checkpoint: each rank writes its slices, compares hashes of some files, and reads its part.

A save, in phases:

1. Rank 0 makes a draft (checkpoint.py). All ranks check that they see it: the directory must be on a shared disk.
2. Each rank writes its slices into the draft, its index last (slice_files.py).
3. Rank 0 writes the other files, waits for the ranks' indices, and commits the draft.

In a background save, phases 2 and 3 run in a thread of each rank. Threads make no collective calls, so rank 0's thread
looks for the indices in the draft. Meanwhile each rank holds the lock of a file (atomic.py). If a lock is free and the
index is missing, that rank has failed or died, and rank 0's thread gives up.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from paceline import plain_state
from paceline.comm.mesh import Mesh, world_group
from paceline.comm.slices import HeldTensor, held
from paceline.errors import CheckpointError, describe_error, warn
from paceline.state import checkpoint, slice_files
from paceline.state import manifest as manifests
from paceline.state.atomic import explained, is_free, lock, unlock
from paceline.state.background_write import BackgroundWrite
from paceline.state.manifest import Damage, Manifest
from paceline.state.plain_files import hash_of
from paceline.state.snapshot import SnapshotBuffers

_LOOK_SECONDS = 0.02
_STILL_SECONDS = 60.0  # rank 0's thread gives up if the draft has not grown for so long; for disks without locks
_TOKEN = "seen-by-all"


def part_name(kind: str, number: int) -> str:
    """The name of a part of a checkpoint. kind: "models" or "optimizers"."""
    return f"{kind[:-1]}_{number}"


class HeldParts:
    """The parts of a checkpoint that hold tensors of which each process has a part. Collective.

    Attributes:
        parts: the encoded parts, without these tensors.
        held: PART/NAME -> tensor.
    """

    def __init__(self, state: Mapping[str, Any], mesh: Mesh) -> None:
        self.parts: dict[str, checkpoint.EncodedPart] = {}
        self.held: dict[str, HeldTensor] = {}
        for kind in ("models", "optimizers"):
            for number, value in enumerate(state[kind]):
                part = part_name(kind, number)
                document, tensors, apart = plain_state.encode_apart(held(value, mesh), f"checkpoint part {part!r}")
                self.parts[part] = checkpoint.EncodedPart(document, tensors)
                self.held |= {f"{part}/{name}": one for name, one in apart.items() if isinstance(one, HeldTensor)}


class SlicedSave:
    """The saves in slices of one run. All ranks make the same calls.

    writer: this process's background thread.
    """

    def __init__(self, writer: BackgroundWrite) -> None:
        self._writer = writer
        self._buffers = SnapshotBuffers()  # of this process's slices
        self._own_buffers = SnapshotBuffers()  # of rank 0's tensors that are not in slices
        self._incomplete = False  # whether rank 0's thread has failed because other ranks' slices are missing
        self._warned = False

    def save(
        self,
        directory: str | Path,
        step: int,
        held_parts: HeldParts,
        others: Callable[[], dict[str, Any]],
        *,
        background: bool,
        **commit: Any,
    ) -> tuple[bool, Path | None]:
        """Write a checkpoint. Returns (whether the directory is on a disk that all ranks share, the result of `save`).

        If the disk is not shared, nothing is written. Collective.

        Args:
            others: called on rank 0; returns the parts without tensors in slices.
            background: return when the state is copied.
            commit: further arguments of `Draft.commit`.
        """
        stack, drafts = ExitStack(), list[checkpoint.Draft]()
        main = world_group().rank == 0

        def begin() -> str:
            drafts.append(stack.enter_context(checkpoint.draft(Path(directory).absolute(), step)))
            (drafts[0].folder.parent / _TOKEN).write_text(str(os.getpid()))
            return str(drafts[0].folder)

        with stack:
            folder = Path(on_rank_0(begin))
            if not all(world_group().gather((folder.parent / _TOKEN).exists())):
                self._warn_not_shared(directory)
                return False, None
            failure, write = "", None
            try:
                blocks = slice_files.blocks_of(held_parts.held)
                if background:
                    blocks = self._buffers.copy(blocks)
                    stack.enter_context(_holding(_lock_file(folder, world_group().rank)))
                write = partial(slice_files.write, folder, world_group().rank, held_parts.held, blocks)
                if main:
                    buffers = self._own_buffers if background else None
                    encoded = checkpoint.encode_parts({**held_parts.parts, **others()}, buffers)
                    rest = partial(drafts[0].commit, encoded, **commit)
                if not background:
                    write()
            except CheckpointError as error:
                failure = str(error)
            except Exception as error:  # report any error on all ranks, so that none waits
                failure = describe_error(error)
            failed = [(rank, text) for rank, text in enumerate(world_group().gather(failure)) if text]
            if failed:
                raise CheckpointError(failed[0][1] if failed[0][0] == 0 else f"rank {failed[0][0]}: {failed[0][1]}")
            assert write is not None
            count = world_group().size
            if not background:
                return True, on_rank_0(lambda: rest(slices=slice_files.entries(folder, count)))
            self._incomplete = False
            kept = stack.pop_all()  # the draft now belongs to the thread
            if main:
                self._begin(step, kept, lambda: self._write_and_commit(write, rest, folder, count))
            else:
                self._begin(step, kept, lambda: _written(write, folder))
            return True, None

    def _begin(self, step: int, stack: ExitStack, write: Callable[[], Path]) -> None:
        def closing() -> Path:
            with stack:
                return write()

        try:
            self._writer.begin(step, closing)
        except CheckpointError:
            stack.close()
            raise

    def _write_and_commit(self, write: Callable[[], None], rest: Callable[..., Path], folder: Path, count: int) -> Path:
        """Rank 0's thread: phases 2 and 3."""
        try:
            write()
        except BaseException:
            _await_ends(folder, count)  # the draft is removed next, and nobody may write into it then
            raise
        size, since = -1, time.monotonic()
        while missing := _missing(folder, count):
            now = sum(entry.stat().st_size for entry in os.scandir(folder))
            if now != size:
                size, since = now, time.monotonic()
            ended = [rank for rank in missing if is_free(_lock_file(folder, rank))]
            # A rank may have written its index between the two looks.
            if set(ended) & set(_missing(folder, count)) or time.monotonic() - since > _STILL_SECONDS:
                self._incomplete = True
                first = slice_files.file_name((ended or missing)[0])
                raise CheckpointError(f"{len(missing)} of {count} ranks did not write their slices ({first})")
            time.sleep(_LOOK_SECONDS)
        return rest(slices=slice_files.entries(folder, count))

    def finish(self) -> Path | None:
        """Wait for the background save, and return its path. Collective. Raises CheckpointError on all ranks."""
        failure = ""
        if world_group().rank != 0:
            try:
                self._writer.finish()
            except CheckpointError as error:
                failure = f"rank {world_group().rank}: {error}"
        failed = [text for text in world_group().gather(failure) if text]

        def finish() -> Path | None:
            try:
                return self._writer.finish()
            except CheckpointError as error:  # if rank 0 failed by itself, others miss the draft that it removed
                raise CheckpointError(failed[0] if failed and self._incomplete else str(error)) from error

        return on_rank_0(finish)

    def _warn_not_shared(self, directory: str | Path) -> None:
        if world_group().rank == 0 and not self._warned:
            self._warned = True
            warn(
                f"not all ranks see the checkpoint directory {directory}, so rank 0 gathers the whole state and writes "
                "it. Use a directory on a disk that all machines share: then each rank writes its own part."
            )


def _missing(folder: Path, count: int) -> list[int]:
    """The ranks that have not written their slices."""
    there = set(os.listdir(folder))
    return [rank for rank in range(count) if slice_files.file_name(rank) not in there]


def _await_ends(folder: Path, count: int) -> None:
    """Wait until the other ranks write no more."""
    deadline = time.monotonic() + _STILL_SECONDS
    files = [_lock_file(folder, rank) for rank in range(1, count)]
    while any(file.exists() and not is_free(file) for file in files) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _lock_file(folder: Path, rank: int) -> Path:
    return folder.parent / f"{rank}.lock"


@contextlib.contextmanager
def _holding(path: Path) -> Iterator[None]:
    """A context in which this process holds the lock of a file, if the file system has locks."""
    with explained(checkpoint.CANNOT_SAVE, path.parent.parent):
        handle = lock(path)
    try:
        yield
    finally:
        if handle is not None:
            unlock(path, handle, remove=False)


def _written(write: Callable[[], None], folder: Path) -> Path:
    write()
    return folder


def on_rank_0(action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0. Every rank returns its result, or raises its CheckpointError. Collective."""
    failure, result = None, None
    if world_group().rank == 0:
        try:
            result = action()
        except CheckpointError as error:
            failure = str(error)
    failure, result = world_group().broadcast((failure, result))
    if failure is not None:
        raise CheckpointError(failure)
    return result


@contextlib.contextmanager
def verifying() -> Iterator[Callable[[Path, Manifest], None]]:
    """A context for rank 0 that yields `manifest.verify`, divided among all ranks that see the files.

    Meanwhile the other ranks call `help_verify`.
    """
    group = world_group()

    def verify(folder: Path, manifest: Manifest) -> None:
        names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        group.broadcast((str(folder.absolute()), hash_of(folder / manifests.NAME), names))
        answers = group.gather(_examined(folder, manifest, names[:: group.size]))
        alone = [name for rank, lines in enumerate(answers) if lines is None for name in names[rank :: group.size]]
        found = [line for lines in answers for line in lines or ()]
        found += _examined(folder, manifest, alone)
        if found:
            raise Damage(*found)

    try:
        yield verify if group.size > 1 else manifests.verify
    finally:
        if group.size > 1:
            group.broadcast(None)


def help_verify() -> None:
    """Compare the hashes of some files for rank 0, until it has found a checkpoint."""
    group = world_group()
    nothing: Any = None
    while (asked := group.broadcast(nothing)) is not None:
        folder, digest, names = asked
        lines: list[str] | None = None
        with contextlib.suppress(Damage, OSError):
            if hash_of(Path(folder) / manifests.NAME) == digest:
                manifest = manifests.load(Path(folder))
                lines = _examined(Path(folder), manifest, names[group.rank :: group.size])
        group.gather(lines)


def _examined(folder: Path, manifest: Manifest, names: list[str]) -> list[str]:
    """Lines about the damaged files among `names`."""
    some = Manifest(manifest.step, manifest.serial, None, {name: manifest.files[name] for name in names})
    try:
        manifests.verify(folder, some)
    except Damage as error:
        return error.lines
    return []


def all_see(folder: Path) -> bool:
    """Whether all ranks see the same checkpoint at this path. Collective."""
    try:
        digest = hash_of(folder / manifests.NAME)
    except OSError:
        digest = ""
    return len(set(world_group().gather(digest))) == 1 and bool(digest)


def read_together(folder: Path) -> dict[str, Any]:
    """Read a checkpoint that all ranks see. Tensors of models and optimizers are StoredTensors. Collective."""

    def read() -> tuple[Any, ...]:
        names = checkpoint.part_names(folder)
        apart = [name for name in names if name.startswith(("model_", "optimizer_"))]
        rest = checkpoint.read(folder, only=set(names) - set(apart))[1]
        return (rest, *checkpoint.read_stored(folder, apart))

    rest, documents, index = on_rank_0(read)
    reader = slice_files.SliceReader(folder, index)
    return rest | {name: reader.read_part(name, data) for name, data in documents.items()}
