"""Record digests of the examples that are passed to the collate function of a training loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from paceline.data.agreement import digest_of_example
from paceline.data.batch_plan import Part, Request
from paceline.verify.worker.rng_draws import generator_states

_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class CollateRecorder:
    """Replaces the collate function of one loader.

    depends_on_shard: the function's random draws depend on the shard (collate="shard").
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, depends_on_shard: bool) -> None:
        self.__wrapped__ = collate or default_collate
        self._depends_on_shard = depends_on_shard
        self._calls: list[list[str]] = []  # the digests of each call since the last yield
        self._last_call: list[str] = []  # the digests of the last call
        self._drew = False  # whether a call since the last yield drew numbers

    @classmethod
    def install(cls, options: dict[str, Any]) -> CollateRecorder:
        """Put a recorder into the options of a loader. The loader then reads in the main process, right before each
        yield."""
        for name in _WORKERS:
            options.pop(name, None)
        collated = options["collate_fn"] = cls(options.get("collate_fn"), options.get("collate") == "shard")
        return collated

    def __call__(self, examples: list[Any]) -> Any:
        before = generator_states(torch.device("cpu")) if self._depends_on_shard else None
        self._last_call = [" ".join(map(str, digest_of_example(example))) for example in examples]
        self._calls.append(self._last_call)
        batch = self.__wrapped__(examples)
        self._drew |= before is not None and before != generator_states(torch.device("cpu"))
        return batch

    def collect(self, request: Request, reversed_batches: bool) -> tuple[Iterator[tuple[Part, list[str]]], bool]:
        """Return (the parts of a yield with the digests of their examples, whether random draws depended on the shard).

        reversed_batches: the examples came in reverse order.
        """
        calls, last_call, drew = iter(self._calls), self._last_call[:: -1 if reversed_batches else 1], self._drew
        self._calls, self._drew = [], False

        def digests(part: Part) -> list[str]:
            if request.whole:
                return last_call[part.start : part.start + len(part.indices)]
            if part.indices:
                return next(calls)[:: -1 if reversed_batches else 1]
            return next(calls) and next(
                calls
            )  # for an empty shard, the loader collates one example and then four, to learn the batch's structure

        return ((part, digests(part)) for part in request.parts), drew
