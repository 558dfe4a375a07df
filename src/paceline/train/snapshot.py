"""Copies of tensors in host memory, that a checkpoint can be written from.

`on_host` copies only what a safetensors file cannot take as it is: for a save during which nothing trains.
`SnapshotBuffers` copies everything, into memory that is allocated once and used again by each later snapshot: for a
save that goes on while training changes the originals. (Fresh memory can cost twenty times the copy itself: the kernel
hands it out page by page.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SnapshotBuffers:
    """Host memory for one set of named tensors, kept from snapshot to snapshot."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Tensor, bool]] = {}  # name -> (buffer, pinned?)

    def take(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each tensor on the host: contiguous, whole, sharing memory with no other.

        Copies from CUDA go to pinned memory, all at once, with one wait at the end. What comes back are the buffers
        themselves: the next `take` overwrites them. An entry is allocated anew only where its shape, dtype or kind of
        source changed, and given up once its name is gone.
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

    @property
    def nbytes(self) -> int:
        """Bytes held. (Pinned memory may take more: torch rounds each block up to a power of two.)"""
        return sum(buffer.nbytes for buffer, _ in self._buffers.values())

    def _buffer(self, name: str, source: Tensor) -> Tensor:
        if name in self._buffers:
            buffer, pinned = self._buffers[name]
            if buffer.shape == source.shape and buffer.dtype == source.dtype and pinned == source.is_cuda:
                return buffer
            del self._buffers[name], buffer  # so that its memory is free before the new one is taken
        buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._buffers[name] = buffer, source.is_cuda
        return buffer


def on_host(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, detached, on the host, contiguous, with no memory in common; a copy only where there must be.

    Tied weights come out whole under each of their names, as load_state_dict wants them and as safetensors (which
    refuses shared memory) asks. Views of disjoint parts of one storage are left as they are.
    """
    ready: dict[str, Tensor] = {}
    borrowed: list[tuple[int, int, str]] = []  # [start, end) in memory, of what was not copied
    for name, source in named.items():
        plain = source.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            borrowed.append((plain.data_ptr(), plain.data_ptr() + plain.nbytes, name))
        ready[name] = plain
    free_from = 0
    for start, end, name in sorted(borrowed, key=lambda one: (one[0], -one[1])):  # the longest at a place stays there
        if start < free_from:
            ready[name] = ready[name].clone()
        else:
            free_from = end
    return ready
