"""Codecs: lossy compression of gradients before they are sent.

  none       no compression.
  bf16       16 bits: the exponents of float32, 8 bits of mantissa.
  fp16       16 bits: 11 bits of mantissa, exponents from -24 to 15. Gradients that fit on each replica may overflow
             when they are added. So a bucket is first scaled by a power of two, such that the sum of the replicas'
             largest elements is at most 2**15.
  powersgd   a matrix M is approximated by P Q^T, and the thin matrices P and Q with `rank` columns are sent. They come
             from one step of power iteration that starts at the last Q (Vogels et al. 2019, "PowerSGD", algorithm 1).
             Vectors, and matrices that would not shrink, are sent unchanged.
  topk       the elements of largest magnitude, a fraction `ratio` of all, are sent as (index, value) (Stich et al.
             2018, "Sparsified SGD with memory"; Lin et al. 2018, "Deep gradient compression", without its momentum
             correction).

Error feedback (Karimireddy et al. 2019, "Error feedback fixes SignSGD"): the residual is the part of the gradient that
a replica did not send. The replica adds it to its next gradient. Up to rounding in the last bit, each codec satisfies

    sum over replicas of (gradient + residual before) = decoded sum + sum over replicas of residual after

Summed over steps, the updates equal the gradients, up to the last residuals.

A codec object is stateless: `init(shape)` makes the state of one tensor, and `total` returns the next state. If a
gradient is not finite on one replica, its decoded sum is not finite on any replica.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import SettingError, suggest
from paceline.torch_private.core import DisableTorchFunction

State = dict[str, Tensor]
"""A codec's state for one tensor: "residual" (1-d, in the tensor's memory order), and "q" for powersgd."""


class Sums(Protocol):
    """Sums over the replicas (comm/codec_sums.py)."""

    size: int

    def add(self, flat: Tensor) -> None:
        """Replace a 1-d tensor by the sum over all replicas."""

    def gather(self, flat: Tensor) -> Tensor:
        """(replicas, len(flat)): all replicas' 1-d tensors."""

    def add_rounded(self, flat: Tensor, rounding: Rounding, scale: Tensor | None) -> Tensor:
        """Like `add`, with messages encoded by `rounding`. Returns the sum of this replica's rounding errors."""

    def close(self) -> None:
        """Release open resources."""


class Codec(ABC):
    """Compresses a bucket of gradients and sums it over replicas."""

    name: str

    @abstractmethod
    def init(self, shape: Sequence[int], like: Tensor, seed: int = 0) -> State:
        """Make the first state of a tensor, the same on all replicas.

        shape: the tensor's shape, with dimensions in memory order. like: gives the state's dtype and device.
        """

    @abstractmethod
    def total(self, flat: Tensor, shapes: Sequence[Sequence[int]], states: Sequence[State], sums: Sums) -> list[State]:
        """Replace `flat` by the decoded sum over all replicas, and return the next states.

        `flat` concatenates tensors of these shapes; the caller has added their residuals.
        """


class Rounding(Codec):
    """bf16 and fp16: messages are rounded to 16 bits; sums are computed in full precision."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def init(self, shape: Sequence[int], like: Tensor, seed: int = 0) -> State:
        return {"residual": like.new_zeros(math.prod(shape))}

    def encode(self, values: Tensor, scale: Tensor | None) -> Tensor:
        return (values if scale is None else values * scale).to(self.dtype)

    def decode(self, message: Tensor, like: Tensor, scale: Tensor | None) -> Tensor:
        values = message.to(like.dtype)
        return values if scale is None else values / scale

    def total(self, flat: Tensor, shapes: Sequence[Sequence[int]], states: Sequence[State], sums: Sums) -> list[State]:
        scale = _scale(flat, sums) if self.dtype == torch.float16 and flat.numel() else None
        kept = sums.add_rounded(flat, self, scale)
        return [{"residual": part} for part in kept.split([math.prod(shape) for shape in shapes])]


def _scale(flat: Tensor, sums: Sums) -> Tensor:
    """(1,): the power of two that scales the sum of the replicas' largest magnitudes to between 2**14 and 2**15; 1 if
    that sum is not finite. Scaling by a power of two is exact, so encoding a second time changes nothing."""
    largest = flat.abs().amax().reshape(1)
    sums.add(largest)
    exponent = 15 - torch.frexp(largest).exponent
    if flat.dtype == torch.float64:  # builds the power from its bits, which is exact on every device
        power = ((exponent.to(torch.int64).clamp(-1000, 1000) + 1023) << 52).view(torch.float64)
    else:
        power = ((exponent.to(torch.int32).clamp(-110, 110) + 127) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), power, torch.ones_like(power))


class PowerSGD(Codec):
    """Sends a matrix M (rows, columns) as P (rows, rank) and Q (columns, rank)."""

    def __init__(self, rank: int = 4) -> None:
        self.name, self.rank = f"powersgd:rank={rank}", rank

    def init(self, shape: Sequence[int], like: Tensor, seed: int = 0) -> State:
        state = {"residual": like.new_zeros(math.prod(shape))}
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        rank = min(self.rank, rows, columns)
        if rank * (rows + columns) < rows * columns:
            generator = torch.Generator().manual_seed(seed)
            with DisableTorchFunction():  # see same_bits._digest_weights
                state["q"] = torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(like)
        return state

    def total(self, flat: Tensor, shapes: Sequence[Sequence[int]], states: Sequence[State], sums: Sums) -> list[State]:
        pairs = list(zip(_cut(flat, shapes), states, strict=True))
        matrices = [tensor.reshape(tensor.shape[0], -1) for tensor, state in pairs if "q" in state]
        plain = [tensor for tensor, state in pairs if "q" not in state]
        q = orthonormal([state["q"] for state in states if "q" in state])

        # Round 1: P = sum of M Q over replicas. Uncompressed tensors are sent in the same message.
        p = _added([*plain, *(m @ right for m, right in zip(matrices, q, strict=True))], sums)
        for tensor, total in zip(plain, p, strict=False):
            tensor.copy_(total)
        p = orthonormal(p[len(plain) :])

        # Round 2: Q = sum of M^T P over replicas. A replica's residual is its M minus its own term of P Q^T.
        own = [m.mT @ left for m, left in zip(matrices, p, strict=True)]
        kept = [m - left @ right.mT for m, left, right in zip(matrices, p, own, strict=True)]
        q = _added(own, sums)
        for matrix, left, right in zip(matrices, p, q, strict=True):
            matrix.copy_(left @ right.mT)
        rest = iter(zip(kept, q, strict=True))
        new = []
        for state in states:
            if "q" in state:
                residual, right = next(rest)
                new.append({"residual": residual.reshape(-1), "q": right})
            else:
                new.append({"residual": torch.zeros_like(state["residual"])})
        return new


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis of the columns of each matrix (rows, rank), with rows >= rank. One QR call per shape."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    bases = list(matrices)
    for numbers in by_shape.values():
        stacked = torch.linalg.qr(torch.stack([matrices[number] for number in numbers])).Q
        for number, basis in zip(numbers, stacked, strict=True):
            bases[number] = basis
    return bases


class TopK(Codec):
    """Sends each tensor's elements of largest magnitude, at least one per tensor."""

    def __init__(self, ratio: float = 0.01) -> None:
        self.name, self.ratio = f"topk:ratio={ratio:g}", ratio

    def init(self, shape: Sequence[int], like: Tensor, seed: int = 0) -> State:
        return {"residual": like.new_zeros(math.prod(shape))}

    def count(self, numel: int) -> int:
        return min(numel, max(1, math.ceil(self.ratio * numel - 1e-9)))

    def encode(self, flat: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return (indices into `flat`, values). Indices are int32 if they fit. All replicas have equal counts."""
        kind = torch.int32 if flat.numel() < 2**31 else torch.int64
        found, start = [torch.empty(0, dtype=kind, device=flat.device)], 0
        for part in flat.split([math.prod(shape) for shape in shapes]):
            if part.numel():
                found.append((part.abs().topk(self.count(part.numel()), sorted=False).indices + start).to(kind))
            start += part.numel()
        indices = torch.cat(found)
        return indices, flat[indices]

    def decode(self, indices: Tensor, values: Tensor, into: Tensor) -> None:
        into.index_add_(0, indices, values)

    def total(self, flat: Tensor, shapes: Sequence[Sequence[int]], states: Sequence[State], sums: Sums) -> list[State]:
        indices, values = self.encode(flat, shapes)
        kept = flat.clone()
        kept[indices] -= values  # 0; or NaN if the value was not finite
        everyones = zip(sums.gather(indices), sums.gather(values), strict=True)
        flat.zero_()
        for their_indices, their_values in everyones:  # in the same order on all replicas
            self.decode(their_indices, their_values, flat)
        return [{"residual": part} for part in kept.split([math.prod(shape) for shape in shapes])]


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split a flat tensor into views of these shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _added(tensors: Sequence[Tensor], sums: Sums) -> list[Tensor]:
    """Sum each tensor over the replicas. All tensors are sent together."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sums.add(flat)
    return _cut(flat, [tensor.shape for tensor in tensors])


# ---- by name ----

CODECS = ("none", "bf16", "fp16", "powersgd", "topk")
_OPTIONS = {"powersgd": "rank", "topk": "ratio"}


def parse(text: str) -> Codec | None:
    """Parse `bf16`, `powersgd:rank=4` and so on into a codec; None for "none".

    Raises SettingError for an unknown name or option, or a value out of range.
    """
    if not isinstance(text, str):
        raise SettingError(f'codec={text!r}: use a name such as "bf16" or "powersgd:rank=4".')
    name, _, rest = text.partition(":")
    if name not in CODECS:
        raise SettingError(f"codec={text!r} is not known. {suggest(name, CODECS)}")
    option, equals, value = rest.partition("=")
    if rest and name not in _OPTIONS:
        raise SettingError(f"codec={text!r}: {name} takes no options. Write codec={name}.")
    if rest and (option != _OPTIONS[name] or not equals):
        raise SettingError(f"codec={text!r}: {name} has no option {option!r}. {suggest(option, [_OPTIONS[name]])}")
    if name == "powersgd":
        return PowerSGD(_rank(text, value)) if rest else PowerSGD()
    if name == "topk":
        return TopK(_ratio(text, value)) if rest else TopK()
    return {"bf16": Rounding("bf16", torch.bfloat16), "fp16": Rounding("fp16", torch.float16)}.get(name)


def _rank(text: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise SettingError(f"codec={text!r}: rank={value}: use a whole number of at least 1.")
    return int(value)


def _ratio(text: str, value: str) -> float:
    try:
        ratio = float(value)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise SettingError(f"codec={text!r}: ratio={value}: use a number above 0 and up to 1.")
    return ratio
