"""Checks that all ranks read the same data, once for each training loader, at its first optimizer step.

(All ranks reach that step. A rank may not create or iterate the loader.)

Every rank reads the data set, and yields its part of an order that all ranks compute the same way. If the data or the
order differs between ranks, some examples are lost and others are yielded twice. Typical causes are a data set that is
split at random before `start`, a sampler with a different order on each rank, and a stream that shards itself by rank.
The ranks compare the arguments of their loaders, the indices of the first global batch, and digests of the first
examples.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm.mesh import world_group
from paceline.errors import UsageError, warn

COMPARED = 8
"""Number of examples of the first global batch to compare. Every rank reads these in addition to its shard."""

COMPARED_IN_STREAM = 64
"""Number of examples of a stream to compare. Every rank reads the whole stream anyway."""

_BYTES = 4096  # bytes, or elements of an array, that are compared per leaf: different data usually differ earlier


class Probe(NamedTuple):
    """One rank's view of the first global batch."""

    order: int | None  # a digest of all indices; None for a stream, which has no indices
    indices: tuple[int, ...]  # the examples to compare
    examples: tuple[tuple[int, ...], ...] = ()  # for each example, a digest of each leaf (a tensor, string or number)


def probe_of_indices(batch: Sequence[int]) -> Probe:
    """Make the probe of a global batch from its indices. A fetcher adds the examples."""
    order = zlib.crc32(np.asarray(batch, dtype=np.int64).tobytes())
    return Probe(order, tuple(int(i) for i in batch[:COMPARED]))


def probe_of_stream(examples: Iterable[Any]) -> Probe:
    return Probe(None, (), tuple(digest_of_example(example) for example in islice(examples, COMPARED_IN_STREAM)))


def digest_of_example(example: Any) -> tuple[int, ...]:
    """A digest of each leaf, in order. Of a leaf without data (an object, a function) only the type is digested."""
    try:
        return tuple(zlib.crc32(leaf) for leaf in _leaves(example))
    except Exception:  # a user's class may raise anything; its examples are then not compared
        return ()


def _leaves(node: Any) -> Iterator[bytes]:
    if isinstance(node, Tensor) and node.layout == torch.strided and not (node.is_meta or node.is_quantized):
        yield f"{node.dtype}{tuple(node.shape)}".encode()
        yield node.detach().flatten()[:_BYTES].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(node, np.ndarray) and node.dtype != object:
        yield f"{node.dtype}{node.shape}".encode()
        yield node.ravel()[:_BYTES].tobytes()
    elif isinstance(node, (bytes, bytearray)):
        yield bytes(node[:_BYTES])
    elif node is None or isinstance(node, (str, int, float, complex, np.generic)):
        yield repr(node)[:_BYTES].encode()
    elif isinstance(node, Mapping):
        for key in node:
            yield repr(key).encode() if isinstance(key, (str, int)) else b""
            yield from _leaves(node[key])
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for field in dataclasses.fields(node):
            yield from _leaves(getattr(node, field.name))
    elif callable(getattr(type(node), "tobytes", None)):  # a PIL image
        yield node.tobytes()[:_BYTES]
    else:
        yield type(node).__qualname__.encode()


def check_same_data(name: str, made_of: dict[str, Any], probe: Probe | None) -> None:
    """Compare the loader `name` of all ranks. Collective. made_of: the loader's arguments.

    Raises UsageError on every rank if the ranks do not read the same data in the same order. If only the examples of a
    map-style data set differ, rank 0 warns instead: they may be the same examples, augmented at random.
    """
    received: list[Any] = world_group().gather((made_of, None if probe is None else tuple(probe)))
    everyone = [(given, None if sent is None else Probe(*sent)) for given, sent in received]
    for key in dict.fromkeys(key for given, _ in everyone for key in given):
        values = [given.get(key) for given, _ in everyone]
        if (other := _first_different(values)) is not None:
            raise UsageError(
                f"loader {name!r} is not the same on all ranks: {key}={values[0]!r} on rank 0, {key}={values[other]!r} "
                f"on rank {other}. {_REMEDY}"
            )
    probes = [probe for _, probe in everyone if probe is not None]
    if len(probes) < len(everyone):
        return
    if (other := _first_different([probe.order for probe in probes])) is not None:
        raise UsageError(
            f"loader {name!r}: the order of the examples on rank {other} differs from rank 0, starting in the first "
            "global batch. Some examples would be lost and others used twice. The sampler or the data that it was made "
            f"from differs. {_REMEDY}"
        )
    other = _first_different_examples([probe.examples for probe in probes])
    if other is None:
        return
    if probes[0].order is None:
        raise UsageError(
            f"loader {name!r}: the examples of an iterable data set on rank {other} differ from rank 0. Perhaps the "
            "data set splits itself by rank (webdataset's nodesplitter, split_dataset_by_node of datasets). Most "
            "examples would then be lost: Paceline reads the whole stream on every rank and splits each global batch "
            "itself. Remove that split. "
            f"{_REMEDY}"
        )
    if world_group().rank == 0:
        warn(
            f"loader {name!r}: examples with the same index are not the same on all ranks (rank {other} and rank 0). "
            f"If they are different data, some examples are lost and others used twice. {_REMEDY} If only their "
            "random augmentation differs, draw from the global generator of torch, NumPy or Python: Paceline seeds "
            "these by the example, so that runs can be repeated.",
        )


_REMEDY = (
    "Make the data the same on every rank: draw, split or shuffle at random after paceline.start(), which gives all "
    "ranks the same seed, or use a generator with a fixed seed."
)


def _first_different(values: Sequence[Any]) -> int | None:
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _first_different_examples(digests: Sequence[tuple[tuple[int, ...], ...]]) -> int | None:
    """The first rank with different examples from rank 0, or None. Also None if, of the leaves that vary between
    examples, at least half agree: labels and ids agree even if images are augmented with unseeded random numbers."""
    other = _first_different(digests)
    if other is None:
        return None
    columns = [zip(*examples, strict=False) for examples in (digests[0], digests[other])]
    varying = [one == two for one, two in zip(*columns, strict=False) if len(set(one)) > 1]
    return None if varying and 2 * sum(varying) >= len(varying) else other
