"""Copy tensors to host memory, to write a checkpoint from them.

`on_host` copies only tensors that safetensors cannot write unchanged. Use it if training waits for the save.
`SnapshotBuffers` copies every tensor, into memory that later snapshots reuse. Use it if training continues during the
save. (Allocating new memory can take twenty times the time of the copy, since the kernel maps it page by page.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError


class SnapshotBuffers:
    """Host memory for one set of named tensors. Each snapshot reuses it."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Tensor, bool]] = {}  # name -> (buffer, whether it is pinned)

    def copy(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A contiguous copy of each tensor on the host, in separate memory.

        Copies from CUDA go to pinned memory, and the host waits once for all of them. Returns the buffers themselves,
        which the next call overwrites. A buffer is reallocated if the shape, the dtype or the kind of device has
        changed. It is freed if its name is no longer in `named`.
        """
        self._buffers = {name: kept for name, kept in self._buffers.items() if name in named}
        busy: set[torch.device] = set()
        with torch.no_grad():
            for name, source in named.items():
                buffer = self._buffer(name, source)
                buffer.copy_(source, non_blocking=source.is_cuda)
                if source.is_cuda:
                    busy.add(source.device)
        for device in busy:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._buffers[name][0] for name in named}

    def _buffer(self, name: str, source: Tensor) -> Tensor:
        if name in self._buffers:
            buffer, pinned = self._buffers[name]
            if buffer.shape == source.shape and buffer.dtype == source.dtype and pinned == source.is_cuda:
                return buffer
            del self._buffers[name], buffer  # free its memory before allocating the new buffer
        buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._buffers[name] = buffer, source.is_cuda
        return buffer


def on_host(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, detached and contiguous; no two share memory. Copied only if necessary.

    Tied weights are copied under each of their names: load_state_dict needs all names, and safetensors refuses shared
    memory. Views of disjoint parts of one storage are not copied.
    """
    ready: dict[str, Tensor] = {}
    borrowed: list[tuple[int, int, str]] = []  # (start address, end address, name) of each tensor
    for name, source in named.items():
        plain = source.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            borrowed.append((plain.data_ptr(), plain.data_ptr() + plain.nbytes, name))
        ready[name] = plain
    free_from = 0
    for start, end, name in sorted(borrowed, key=lambda one: (one[0], -one[1])):  # at each address the longest first
        if start < free_from:
            ready[name] = ready[name].clone()
        else:
            free_from = end
    return ready


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write one safetensors file. Raises CheckpointError for tensors that the format cannot hold."""
    try:
        save_file(on_host(tensors), path, metadata=metadata)
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(
            f"the safetensors format cannot store these tensors ({error}). Convert them before saving."
        ) from error
    # safetensors makes files that only their owner can read. Copy the mode of the directory, which follows the umask.
    with suppress(PermissionError):  # a file system without modes
        path.chmod(path.parent.stat().st_mode & 0o666)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of a model's tensors, by name."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        plain = value.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return found.hexdigest()
