"""Checkpoints on disk. If the writer is killed at any time, the last complete checkpoint remains.

    checkpoints/
      step-00000042/         one checkpoint; never changed once it has this name
        model.safetensors    the tensors of the part "model"
        model.json           the rest of that part (plain_state.py)
        ...                  the other parts
        slices-00003.*       the parts of tensors that rank 3 has, if the strategy shards tensors (slice_files.py)
        manifest.json        size and sha256 of every file, written last (manifest.py)
      latest                 the name of the newest checkpoint, for people and other programs

`write`, in phases:
    1. Write each part's files into a scratch directory. A file is synced and hashed while the next files are written.
       Write the manifest.
    2. Sync the scratch directory, rename it to its final name, sync the directory above. The checkpoint is now saved.
    3. Replace the pointer `latest`. Remove checkpoints that are neither among the newest nor among the best.
`find` trusts no name and no pointer: it checks all hashes, returns the newest intact checkpoint, and reports damage.

Only rank 0 calls this module; other ranks write and read slices (sharded_save.py). Several writers in one
directory are safe, but folder_lock.py normally prevents them.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from paceline import plain_state
from paceline.errors import CheckpointError, SettingError, suggest, warn
from paceline.state import manifest as manifests
from paceline.state import slice_files
from paceline.state.atomic import (
    contents,
    damaged,
    explained,
    make_directory,
    nearest,
    remove_debris,
    scratch,
    sync,
    write_whole,
)
from paceline.state.helper_threads import HelperThreads
from paceline.state.manifest import DIRECTORY, Damage, Entry, Manifest
from paceline.state.plain_files import hash_of, open_plain
from paceline.state.snapshot import SnapshotBuffers, save_tensors

POINTER = "latest"
CANNOT_SAVE = "A checkpoint could not be saved to"
CANNOT_EXPORT = "The model could not be exported to"

_saved_to: dict[str, tuple[int, int]] = {}  # path of a directory -> its device and inode at the last save
_SCORE = "score"  # a key in the meta of a manifest
_PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class EncodedPart:
    """One part of a checkpoint, encoded for the disk (plain_state.py)."""

    document: plain_state.Json
    tensors: Mapping[str, Tensor]  # the tensors that the document names

    @classmethod
    def of(cls, state: Any, what: str = "the state") -> EncodedPart:
        """Encode `state`. what: its name in errors ("tracked 'ema'"). Raises CheckpointError: see `encode`."""
        return cls(*plain_state.encode(state, what))


class WholeCheckpoint(NamedTuple):
    """An intact checkpoint: the result of `find`."""

    path: Path
    step: int
    damage: list[str]  # one line per damaged file of newer checkpoints, with its hashes


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep in a directory when another one is written."""

    keep: int | None = None  # the number of newest checkpoints; None: all
    keep_best: int = 0  # in addition, the number of checkpoints with the best scores
    score: float | None = None  # of the checkpoint that is being written; None: it has no score
    mode: str = "min"  # whether the smallest scores are best, or the largest ("max")

    def __post_init__(self) -> None:
        keep, best, score = self.keep, self.keep_best, self.score
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise SettingError(
                f"run.save(keep={keep!r}): give the number of checkpoints to keep, at least 1; None keeps all."
            )
        if isinstance(best, bool) or not isinstance(best, int) or best < 0:
            raise SettingError(f"run.save(keep_best={best!r}): give the number of best checkpoints to keep, 0 or more.")
        if best and keep is None:
            raise SettingError(f"run.save(keep_best={best}): without keep= all checkpoints are kept. Add keep=1.")
        if score is not None and (isinstance(score, bool) or not isinstance(score, (int, float))):
            raise SettingError(f"run.save(score={score!r}): give a number, such as scores['loss'].")
        if self.mode not in ("min", "max"):
            raise SettingError(f"run.save(mode={self.mode!r}): unknown mode. {suggest(str(self.mode), ('min', 'max'))}")


class Scored(NamedTuple):
    """A checkpoint with a score."""

    score: float
    step: int
    path: Path


class _Candidate(NamedTuple):
    """A directory that looks like a checkpoint."""

    path: Path
    manifest: Manifest | None  # None: missing or damaged
    damage: list[str]  # lines about the manifest's damage

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key, by the time of writing. A checkpoint of unknown age counts as the newest, so `find` reports it."""
        match = DIRECTORY.fullmatch(self.path.name)
        step, copy = (int(match[1]), int(match[2] or 1)) if match else (0, 1)
        return (self.manifest.serial if self.manifest else 2**63, step, copy)


def encode_parts(parts: Mapping[str, Any], buffers: SnapshotBuffers | None = None) -> dict[str, EncodedPart]:
    """Encode every part that is not encoded yet.

    buffers: copy the tensors into these buffers, so that the originals may change while `write` runs in another thread.
    The copies are valid until the buffers are used again. Without buffers, the parts share memory with the originals.
    """
    encoded = {
        name: part if isinstance(part, EncodedPart) else EncodedPart.of(part, f"checkpoint part {name!r}")
        for name, part in parts.items()
    }
    if buffers is None:
        return encoded
    copies = buffers.copy({f"{name}/{key}": t for name, part in encoded.items() for key, t in part.tensors.items()})
    return {
        name: EncodedPart(part.document, {key: copies[f"{name}/{key}"] for key in part.tensors})
        for name, part in encoded.items()
    }


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written, in a scratch directory.

    Attributes:
        root: the directory of checkpoints.
        folder: the directory for the new checkpoint's files.
        step: the step of the checkpoint.
        earlier: the checkpoints in the directory.
    """

    root: Path
    folder: Path
    step: int
    earlier: list[_Candidate]

    def commit(
        self,
        parts: Mapping[str, Any],
        *,
        retention: Retention = Retention(),
        meta: Mapping[str, Any] | None = None,
        slices: Mapping[str, Entry] | None = None,
    ) -> Path:
        """Write rank 0's files, and make the checkpoint valid. Arguments, result and errors as for `write`.

        slices: the files that ranks have written into the folder (slice_files.py), or None.
        """
        encoded = encode_parts(parts)
        _check_names(encoded)
        scored = {} if retention.score is None else {_SCORE: float(retention.score)}
        document, tensors = plain_state.encode({**(meta or {}), **scored}, "checkpoint meta")
        if tensors:
            raise CheckpointError(f"checkpoint meta holds the tensor {next(iter(tensors))!r}. Put it into a part.")
        with explained(CANNOT_SAVE, self.root):
            serial = 1 + max((one.manifest.serial for one in self.earlier if one.manifest), default=0)
            format = manifests.FORMAT if slices is None else manifests.SLICED
            _write_files(self.folder, encoded, Manifest(self.step, serial, document, dict(slices or {}), format))
            final = _give_name(self.folder, self.root, self.step, self.earlier)
            sync(self.root)
            with _only_warned(f"The checkpoint {final} is saved, but tidying up after it failed"):
                _replace_pointer(self.root, final.name, self.folder.parent)
                if retention.keep is not None:
                    _prune(self.root, retention, final, self.folder.parent)
        return final


@contextmanager
def draft(directory: str | os.PathLike[str], step: int) -> Iterator[Draft]:
    """A context for writing a checkpoint, until its `commit`. Without a commit, nothing of it remains.

    Raises CheckpointError if the directory cannot be written.
    """
    assert step >= 0, step
    root = Path(directory)
    with explained(CANNOT_SAVE, root):
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a directory")
        if DIRECTORY.fullmatch(root.name):
            raise FileExistsError(errno.EEXIST, "this is the name of one checkpoint; give the directory above it")
        make_directory(root)
        _notice_another(root)
        remove_debris(root)
        earlier = _checkpoints_in(root)
        with scratch(root, f"step-{step:08d}") as temporary:
            built = temporary / "checkpoint"
            built.mkdir()
            yield Draft(root, built, step, earlier)


def write(
    directory: str | os.PathLike[str],
    *,
    step: int,
    parts: Mapping[str, Any],
    retention: Retention = Retention(),
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write a new checkpoint. Returns its directory, `directory`/step-00000042, once it is safely on the disk.

    A second checkpoint of the same step is put beside the first (step-00000042-2), and counts as newer.

    Args:
        parts: name -> nested state (from state_dict(); see plain_state.py) or an EncodedPart.
        retention: which checkpoints to keep, including this one.
        meta: nested state without tensors.

    Raises:
        CheckpointError: a part of the state has no plain form, or files cannot be written (disk full, no permission,
            not a directory). Older checkpoints and the pointer are unchanged. Nothing of the new checkpoint remains,
            unless only the last sync failed: then it is complete. A failure in phase 3 is only a warning.
    """
    encoded = encode_parts(parts)
    with draft(directory, step) as drafted:
        return drafted.commit(encoded, retention=retention, meta=meta)


def find(
    directory: str | os.PathLike[str], verify: Callable[[Path, Manifest], None] = manifests.verify
) -> WholeCheckpoint:
    """Return the newest intact checkpoint in `directory`, which may also be the path of one checkpoint.

    Reads every file and compares its hash. If a checkpoint is damaged, reports this and tries the next older one.

    verify: compares the files of one checkpoint, and raises Damage; in place of `manifest.verify`.

    Raises:
        CheckpointError: there is no checkpoint, or none is intact (the error lists each damaged file and hash), or the
            newest has the format of a newer Paceline.
    """
    root = Path(directory)
    damage: list[str] = []
    for _ in range(5):  # retry if another writer's `keep` has removed checkpoints meanwhile
        candidates = _require_candidates(root)
        damage, vanished = [], False
        for one in sorted(candidates, key=lambda one: one.order, reverse=True):
            try:
                if one.manifest is None:
                    raise Damage(*one.damage)
                manifests.require_known(one.manifest, one.path)
                verify(one.path, one.manifest)
            except Damage as error:
                vanished |= not one.path.exists()
                damage += error.lines if one.path.exists() else []
                continue
            return WholeCheckpoint(one.path, one.manifest.step, damage)
        if not vanished:
            break
    listed = "\n  ".join(damage)
    raise CheckpointError(
        f"{root} holds no intact checkpoint. Damaged or missing:\n  {listed}\n"
        "Restore these files from a copy, give a directory with an intact checkpoint, or start over in an empty "
        "directory."
    )


def examine(directory: str | os.PathLike[str]) -> dict[Path, list[str]]:
    """Check every checkpoint in `directory` (or `directory` itself, if it is a checkpoint). Reads every file.

    Returns a dict, newest first: path -> one line per damaged file; an empty list for an intact checkpoint. Raises
    CheckpointError if there is no checkpoint.
    """
    found: dict[Path, list[str]] = {}
    for one in sorted(_require_candidates(Path(directory)), key=lambda one: one.order, reverse=True):
        found[one.path] = one.damage
        if one.manifest is not None:
            try:
                manifests.require_known(one.manifest, one.path)
                manifests.verify(one.path, one.manifest)
            except (Damage, CheckpointError) as error:
                found[one.path] = str(error).splitlines()
    return found


def holds_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` holds a checkpoint, intact or damaged. False for a missing directory.

    Raises CheckpointError if `directory` is a file or cannot be read.
    """
    root = Path(directory)
    with explained("Cannot look for checkpoints in", root):
        return root.exists() and bool(_candidates(root))


def read(path: str | os.PathLike[str], only: Collection[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read one checkpoint directory. Returns (meta, parts) as passed to `write`, with tensors on the host.

    only: the names of the parts to read; None: all. Hashes are not compared (`find` does this). Tensors are copied out
    of the file: a mapped file has a different memory alignment from torch, which can change the bits of later results.
    """
    folder = Path(path)
    manifest = _manifest(folder)
    with explained("A checkpoint could not be read from", folder):
        names = [name for name in part_names(folder) if only is None or name in only]
        index = slice_files.read_index(folder, manifest, names) if manifest.format == manifests.SLICED else {}
        apart = slice_files.SliceReader(folder, index)
        parts = {name: _read_part(folder, name, manifest, apart) for name in names}
    return plain_state.decode_saved(manifest.meta, {}, f"the meta in {folder / manifests.NAME}"), parts


def part_names(path: str | os.PathLike[str]) -> list[str]:
    """The names of the parts of one checkpoint directory, in the order passed to `write`."""
    names = [name for name in _manifest(Path(path)).files if not name.startswith(manifests.SLICES)]
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def read_stored(path: str | os.PathLike[str], names: Collection[str]) -> tuple[dict[str, bytes], slice_files.Index]:
    """Read some parts of one checkpoint without their tensors. Returns (part -> its JSON, where the tensors are).

    Hashes are not compared, as in `read`. SliceReader decodes the parts and reads tensors, on any process.
    """
    folder = Path(path)
    manifest = _manifest(folder)
    documents = {}
    with explained("A checkpoint could not be read from", folder):
        for name in names:
            with open_plain(folder / f"{name}.json") as file:
                documents[name] = file.read()
        return documents, slice_files.read_index(folder, manifest, names)


def _manifest(folder: Path) -> Manifest:
    try:
        manifest = manifests.load(folder)
    except Damage as error:
        raise CheckpointError(
            f"{folder} is not an intact checkpoint: {error}. Use checkpoint.find(directory) to get an intact one."
        ) from error
    manifests.require_known(manifest, folder)
    return manifest


def export(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> Path:
    """Write a plain safetensors file for `model.load_state_dict(safetensors.torch.load_file(path))`.

    Tied weights are written under each of their names. An older file of this name is replaced atomically. Also writes
    the checksum to FILE.sha256. Raises CheckpointError if the file cannot be written.
    """
    file = Path(path)
    write_whole(file, lambda whole: save_tensors(whole, tensors, {"format": "pt"}), CANNOT_EXPORT, checksum=True)
    return file


def _notice_another(root: Path) -> None:
    """Warn if `root` was replaced since this process's last save, for example because its disk was unmounted.

    The new directory does not hold the earlier checkpoints.
    """
    found, key = root.stat(), os.path.abspath(root)
    before = _saved_to.get(key)
    _saved_to[key] = found.st_dev, found.st_ino
    if before is None or before == _saved_to[key]:
        return
    why = (
        "is now on a different file system. Was its disk unmounted?"
        if before[0] != found.st_dev
        else "has been removed or replaced since the last save."
    )
    warn(
        f"the checkpoint directory {root} {why} It does not hold the earlier checkpoints of this run. This checkpoint "
        "is saved in it anyway. Restore the directory, and check where the next checkpoints are saved."
    )


def _check_names(parts: Mapping[str, EncodedPart]) -> None:
    seen = {manifests.NAME.removesuffix(".json")}
    for name in parts:
        if not _PART_NAME.fullmatch(name):
            raise CheckpointError(
                f"a part of a checkpoint cannot be named {name!r}. Use letters, digits, '_', '-' and '.'."
            )
        if name.casefold() in seen:  # the same file if the file system ignores case
            raise CheckpointError(f"two parts of a checkpoint have the name {name!r}. Rename one of them.")
        seen.add(name.casefold())


def _write_files(built: Path, parts: Mapping[str, EncodedPart], manifest: Manifest) -> None:
    """Phase 1: write the files of all parts, then the manifest."""
    with HelperThreads(2, "paceline-save") as pool:
        pending: dict[str, tuple[Future[str], Future[None]]] = {}

        def seal(name: str) -> None:
            pending[name] = pool.submit(hash_of, built / name), pool.submit(sync, built / name)

        for name, part in parts.items():
            if part.tensors:
                save_tensors(built / f"{name}.safetensors", part.tensors, {"format": "pt", "part": name})
                seal(f"{name}.safetensors")
            (built / f"{name}.json").write_text(json.dumps(part.document, allow_nan=False), "utf-8")
            seal(f"{name}.json")
        for name, (digest, synced) in pending.items():
            synced.result()
            manifest.files[name] = Entry((built / name).stat().st_size, digest.result())
    (built / manifests.NAME).write_bytes(manifest.dump())
    sync(built / manifests.NAME)
    sync(built)


def _give_name(built: Path, root: Path, step: int, earlier: list[_Candidate]) -> Path:
    """Phase 2: rename the finished directory to an unused name."""
    taken = [one.order[2] for one in earlier if one.order[1] == step]
    for copy in itertools.count(1 + max(taken, default=0)):
        final = root / (f"step-{step:08d}" if copy == 1 else f"step-{step:08d}-{copy}")
        try:
            os.rename(built, final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return final
    raise AssertionError("count() never ends")


def _replace_pointer(root: Path, name: str, temporary: Path) -> None:
    pointer = temporary / POINTER
    pointer.write_text(f"{name}\n")
    sync(pointer)
    os.replace(pointer, root / POINTER)
    sync(root)


def ranking(directory: str | os.PathLike[str], mode: str = "min") -> list[Scored]:
    """Return the checkpoints in a directory that have a score, best first. Empty for a missing directory.

    If several checkpoints have the same step, only the newest is included.
    """
    root = Path(directory)
    return _ranked(_checkpoints_in(root) if root.is_dir() else [], mode)


def _ranked(candidates: Iterable[_Candidate], mode: str) -> list[Scored]:
    by_step: dict[int, Scored] = {}
    for path, manifest, _ in sorted(candidates, key=lambda one: one.order):
        score = None if manifest is None else _score_of(manifest)
        if manifest is not None and score is not None:
            by_step[manifest.step] = Scored(score, manifest.step, path)
    sign = 1 if mode == "min" else -1
    return sorted(by_step.values(), key=lambda one: (sign * one.score, one.step))  # for equal scores, the first step


def _score_of(manifest: Manifest) -> float | None:
    """The checkpoint's score; None if it has no score, or a score that is not a number."""
    with suppress(CheckpointError):  # another program may have changed the manifest
        meta = plain_state.decode_saved(manifest.meta, {}, "checkpoint meta")
        score = meta.get(_SCORE) if isinstance(meta, dict) else None
        return score if isinstance(score, (int, float)) and not math.isnan(score) else None
    return None


def _prune(root: Path, retention: Retention, written: Path, temporary: Path) -> None:
    """Remove all but the newest and the best checkpoints. Never removes a directory without a manifest of ours."""
    ours = [one for one in _checkpoints_in(root) if one.manifest and one.manifest.format in manifests.KNOWN]
    best = {one.path for one in _ranked(ours, retention.mode)[: retention.keep_best]}
    for path, manifest, _ in sorted(ours, key=lambda one: one.order, reverse=True)[retention.keep :]:
        if path == written or path in best or path.is_symlink() or manifest is None:
            continue
        names = [*manifest.files, manifests.NAME]
        with suppress(FileNotFoundError):  # another writer has removed it
            if set(os.listdir(path)) <= {*names}:
                # Rename before removing, so that no reader finds an incomplete checkpoint.
                os.rename(path, temporary / path.name)
                shutil.rmtree(temporary / path.name)
            else:  # keep the files of other programs
                for name in names:
                    (path / name).unlink(missing_ok=True)


def _checkpoints_in(root: Path) -> list[_Candidate]:
    """Every directory in `root` with the name and the files of a checkpoint, intact or not."""
    folders = [path for path in sorted(root.iterdir()) if DIRECTORY.fullmatch(path.name) and path.is_dir()]
    return [one for one in map(_candidate, folders) if one.manifest or _holds(one.path, ".json", ".safetensors")]


def _candidates(root: Path) -> list[_Candidate]:
    """The checkpoints in `root`, or `root` itself if it is a checkpoint (even renamed, such as a copy called best/)."""
    itself = _candidate(root)
    if DIRECTORY.fullmatch(root.name):
        return [itself]
    if inside := _checkpoints_in(root):
        return inside
    # Other programs write a manifest.json too.
    return [itself] if itself.manifest or (_holds(root, manifests.NAME) and _holds(root, ".safetensors")) else []


def _candidate(path: Path) -> _Candidate:
    try:
        return _Candidate(path, manifests.load(path), [])
    except Damage as error:
        return _Candidate(path, None, error.lines)


def _holds(path: Path, *endings: str) -> bool:
    with suppress(FileNotFoundError):  # it has just been removed
        return any(name.endswith(endings) for name in os.listdir(path))
    return False


def _require_candidates(root: Path) -> list[_Candidate]:
    with explained("Cannot look for checkpoints in", root):
        if not root.exists():
            there = nearest(root)
            raise CheckpointError(
                f"{root} does not exist, so there is no checkpoint. {there} exists, and contains: {contents(there)}. "
                "Give the directory that you passed to run.save()."
            )
        if candidates := _candidates(root):
            return candidates
        raise CheckpointError(
            f"{root} holds no checkpoint (a directory named like step-00000042). It contains: {contents(root)}. Give "
            "the directory that you passed to run.save(), or one checkpoint in it."
        )


def _read_part(folder: Path, name: str, manifest: Manifest, sliced: slice_files.SliceReader) -> Any:
    """Read one part. sliced: reads all tensors of a checkpoint in slices."""
    tensors: dict[str, Tensor] = {}
    if manifest.format == manifests.SLICED:
        tensors = dict(slice_files.PartTensors(sliced, name))
    elif f"{name}.safetensors" in manifest.files:
        path = folder / f"{name}.safetensors"
        open_plain(path).close()
        with damaged(path), safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    path = folder / f"{name}.json"
    with open_plain(path) as opened, damaged(path):
        return plain_state.read_saved(opened.read(), tensors, str(path))


@contextmanager
def _only_warned(what: str) -> Iterator[None]:
    """Phase 3: the checkpoint is already saved, so an error becomes a warning."""
    try:
        yield
    except OSError as error:
        warn(f"{what}: {error}.")  # Python shows it with the line of run.save()
