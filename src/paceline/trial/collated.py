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
    """In the place of one loader's collate function. backwards: it is given a batch's examples in reverse order."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, backwards: bool) -> None:
        self._collate, self._backwards = collate or default_collate, backwards
        self._calls: list[list[str]] = []  # since the last yield
        self._drew = False

    @classmethod
    def of(cls, options: dict[str, Any], backwards: bool) -> Collated:
        """Put into the options of a loader, which then reads in the main process, for each yield just before it."""
        for name in _WORKERS:
            options.pop(name, None)
        collated = options["collate_fn"] = cls(options.get("collate_fn"), backwards)
        return collated

    def __call__(self, examples: list[Any]) -> Any:
        before = generator_states(torch.device("cpu"))
        self._calls.append([" ".join(map(str, digest_of_example(example))) for example in examples])
        batch = self._collate(examples[::-1] if self._backwards else examples)
        self._drew |= before != generator_states(torch.device("cpu"))
        return batch

    def take(self, request: Request) -> tuple[Iterator[tuple[Part, list[str]]], bool]:
        """(a yield's parts with their examples' digests; whether random numbers were drawn for it)."""
        calls, drew = iter(self._calls), self._drew
        self._calls, self._drew = [], False
        # The form of an empty shard is made of a batch of one example and one of four.
        return ((part, next(calls) if part.indices else next(calls) and next(calls)) for part in request.parts), drew
