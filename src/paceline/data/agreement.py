"""Are the data the same on every rank? The ranks compare them once for each training loader, at its first optimizer
step: all ranks are sure to reach it, and not sure to make or to iterate a loader.

Every rank reads the data set for itself and yields its part of an order that all ranks compute alike. Some data sets
lose examples so, and yield others twice: one that was cut at random before `start`, a sampler with another order on
each rank, a stream that shards itself by rank. The ranks compare the arguments of their loaders, the indices of the
first global batch, and digests of its first examples.
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

from paceline.comm import collectives
from paceline.errors import UsageError, warn

COMPARED = 8
"""Examples of the first global batch that each rank reads beside its own, to compare them."""

COMPARED_IN_STREAM = 64
"""Examples that are compared in a stream, of which every rank reads all."""

_BYTES = 4096  # of each array: ranks that read other data differ long before


class Probe(NamedTuple):
    """What a rank saw of the first global batch."""

    order: int | None  # a digest of the indices; None for a stream, which has none
    indices: tuple[int, ...]  # of the examples to compare
    examples: tuple[tuple[int, ...], ...] = ()  # for each of them, a digest of each leaf (a tensor, string or number)


def probe_of_indices(batch: Sequence[int]) -> Probe:
    """The probe of a global batch, given by its indices. A fetcher adds the examples."""
    order = zlib.crc32(np.asarray(batch, dtype=np.int64).tobytes())
    return Probe(order, tuple(int(i) for i in batch[:COMPARED]))


def probe_of_stream(examples: Iterable[Any]) -> Probe:
    return Probe(None, (), tuple(digest_of_example(example) for example in islice(examples, COMPARED_IN_STREAM)))


def digest_of_example(example: Any) -> tuple[int, ...]:
    """A digest of each leaf, in order. Of a leaf that is no data (an object, a function) only the type counts."""
    try:
        return tuple(zlib.crc32(leaf) for leaf in _leaves(example))
    except Exception:  # a class of the user's may raise anything; its examples are then not compared
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
    elif callable(getattr(type(node), "tobytes", None)):  # an image of PIL
        yield node.tobytes()[:_BYTES]
    else:
        yield type(node).__qualname__.encode()


def check_same_data(name: str, made_of: dict[str, Any], probe: Probe | None) -> None:
    """Compare the loader `name` of all ranks. Collective. made_of: its arguments.

    Raises UsageError on every rank where the ranks do not read the same data in the same order. Rank 0 warns where only
    examples of a map-style data set differ: they may be the same ones, augmented at random.
    """
    told: list[Any] = collectives.gather_objects((made_of, None if probe is None else tuple(probe)))
    everyone = [(own, None if seen is None else Probe(*seen)) for own, seen in told]
    for key in dict.fromkeys(key for own, _ in everyone for key in own):
        values = [own.get(key) for own, _ in everyone]
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
            f"loader {name!r}: the order of the examples on rank {other} is another than on rank 0, from the first "
            "global batch on, so that some would be lost and others seen twice. The sampler, or what it was made of, "
            f"differs. {_REMEDY}"
        )
    other = _first_different_examples([probe.examples for probe in probes])
    if other is None:
        return
    if probes[0].order is None:
        raise UsageError(
            f"loader {name!r}: the examples of an iterable data set are others on rank {other} than on rank 0. Perhaps "
            "it takes a part for each rank itself (webdataset's nodesplitter, split_dataset_by_node of datasets): then "
            "most would be lost, since Paceline gives every rank its part of each global batch and needs to read the "
            "whole stream on every rank. Leave the split out. "
            f"{_REMEDY}"
        )
    if collectives.rank_of() == 0:
        warn(
            f"loader {name!r}: the examples of the same indices are not the same on all ranks (rank {other} and rank "
            f"0). If they are other data, some are lost and others seen twice. {_REMEDY} If they are only augmented "
            "at random, draw from torch's, NumPy's or Python's own generator, which Paceline keys by the example, and "
            "runs can be repeated.",
        )


_REMEDY = (
    "Make the data alike on every rank: what is drawn, split or shuffled at random belongs after paceline.start(), "
    "which seeds all ranks alike, or needs a generator with a fixed seed."
)


def _first_different(values: Sequence[Any]) -> int | None:
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _first_different_examples(digests: Sequence[tuple[tuple[int, ...], ...]]) -> int | None:
    """The first rank whose examples differ from rank 0's. None where at least half of the leaves that vary from example
    to example are the same: labels and ids are, when an image is augmented with random numbers that no seed reaches."""
    other = _first_different(digests)
    if other is None:
        return None
    columns = [zip(*own, strict=False) for own in (digests[0], digests[other])]
    varying = [one == two for one, two in zip(*columns, strict=False) if len(set(one)) > 1]
    return None if varying and 2 * sum(varying) >= len(varying) else other
