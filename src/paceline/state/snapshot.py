"""Copies of tensors in host memory, from which a checkpoint is written.

`on_host` copies only tensors that safetensors cannot write as they are. It is for a save during which nothing trains.
`SnapshotBuffers` copies every tensor into memory that later snapshots use again. It is for a save that goes on while
training changes the originals. (Fresh memory can cost twenty times the copy: the kernel maps it page by page.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


class SnapshotBuffers:
    """Host memory for one set of named tensors, which each snapshot uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Tensor, bool]] = {}  # name -> (buffer, whether it is pinned)

    def copy(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each tensor on the host: contiguous, whole, sharing memory with no other.

        Copies from CUDA go to pinned memory, with one wait for all of them. The buffers themselves are returned, and
        the next call overwrites them. A buffer is allocated anew where the shape, the dtype or the kind of device has
        changed. It is freed when its name is gone.
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
            del self._buffers[name], buffer  # frees its memory before the new buffer is allocated
        buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._buffers[name] = buffer, source.is_cuda
        return buffer


def on_host(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, detached, on the host, contiguous, without shared memory; copied only where necessary.

    Tied weights are whole under each of their names: load_state_dict wants them so, and safetensors refuses shared
    memory. Views of disjoint parts of one storage are not copied.
    """
    ready: dict[str, Tensor] = {}
    borrowed: list[tuple[int, int, str]] = []  # [start, end) in memory, of what was not copied
    for name, source in named.items():
        plain = source.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            borrowed.append((plain.data_ptr(), plain.data_ptr() + plain.nbytes, name))
        ready[name] = plain
    free_from = 0
    for start, end, name in sorted(borrowed, key=lambda one: (one[0], -one[1])):  # the longest of an address first
        if start < free_from:
            ready[name] = ready[name].clone()
        else:
            free_from = end
    return ready


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of a model's tensors, by name."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        plain = value.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return found.hexdigest()
