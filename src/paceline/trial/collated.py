"""What a training loader's collate function is given: digests of the examples of each yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from paceline.train.agreement import digest_of_example
from paceline.train.order import Part, Request
from paceline.trial.watched import generator_states

_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class Collated:
    """In the place of one loader's collate function. apart: what it draws depends on the shard (collate="shard")."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, apart: bool) -> None:
        self.__wrapped__ = collate or default_collate
        self._apart = apart
        self._calls: list[list[str]] = []  # since the last yield
        self._whole: list[str] = []  # of the last call
        self._drew = False

    @classmethod
    def of(cls, options: dict[str, Any]) -> Collated:
        """Put into the options of a loader, which then reads in the main process, for each yield just before it."""
        for name in _WORKERS:
            options.pop(name, None)
        collated = options["collate_fn"] = cls(options.get("collate_fn"), options.get("collate") == "shard")
        return collated

    def __call__(self, examples: list[Any]) -> Any:
        before = generator_states(torch.device("cpu")) if self._apart else None
        self._whole = [" ".join(map(str, digest_of_example(example))) for example in examples]
        self._calls.append(self._whole)
        batch = self.__wrapped__(examples)
        self._drew |= before is not None and before != generator_states(torch.device("cpu"))
        return batch

    def take(self, request: Request, backwards: bool) -> tuple[Iterator[tuple[Part, list[str]]], bool]:
        """(a yield's parts with their examples' digests; whether random numbers were drawn for it that depend on the
        shard). backwards: the examples came in reverse order."""
        calls, whole, drew = iter(self._calls), self._whole[:: -1 if backwards else 1], self._drew
        self._calls, self._drew = [], False

        def digests(part: Part) -> list[str]:
            if request.whole:
                return whole[part.start : part.start + len(part.indices)]
            if part.indices:
                return next(calls)[:: -1 if backwards else 1]
            return next(calls) and next(calls)  # the form of an empty shard is made of a batch of one and of four

        return ((part, digests(part)) for part in request.parts), drew
