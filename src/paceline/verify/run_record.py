"""The files of a run of `paceline verify`: the records of its ranks, and its tensors."""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import cached_property, lru_cache
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class RunRecord:
    """The records of one run, written by verify/worker/recorder.py.

    Args:
        folder: the folder of the run. Its last part is the name of the run.
        processes: the number of ranks to read.
        first: the first of these ranks.

    Raises:
        FileNotFoundError: a rank has written no record.
    """

    def __init__(self, folder: str, processes: int, first: int = 0) -> None:
        self.folder, self.name = folder, os.path.basename(folder)
        records: list[dict[str, Any]] = []
        for rank in range(first, first + processes):
            with open(os.path.join(folder, f"rank-{rank}.json")) as file:
                records.append(json.load(file))
        self.ranks = [record for record in records if record["steps"]] or records  # parameter servers make no steps

    @cached_property
    def steps(self) -> int:
        """The number of steps that all ranks made."""
        return min((len(record["steps"]) for record in self.ranks if record["steps"]), default=0)

    def step_records(self, step: int) -> list[dict[str, Any]]:
        """The records of one step, by rank."""
        return [record["steps"][step] for record in self.ranks if len(record["steps"]) > step]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors in a file, by name, with the parts of a model that other ranks hold (plain_recorder.py); empty if
        there is no such file."""
        path = os.path.join(self.folder, f"{name}.safetensors")
        found = _tensors(path) if os.path.exists(path) else {}
        for rank in range(1, len(self.ranks) if self.in_parts else 0):
            path = os.path.join(self.folder, f"{name}-r{rank}.safetensors")
            found = {**found, **(_tensors(path) if os.path.exists(path) else {})}
        return found

    @cached_property
    def in_parts(self) -> list[str]:
        """The parameters that each rank holds a part of."""
        return list(self.ranks[0].get("in_parts", ()))

    @staticmethod
    def forget_files() -> None:
        """Call it after files of a run have been replaced."""
        _tensors.cache_clear()

    def moved_buffers(self, step: int) -> list[dict[str, Tensor]]:
        """By how much the forwards of a step have changed buffers, on each rank (plain_recorder.py)."""
        return [self.tensors(f"moved-{step}-r{record['rank']}") for record in self.ranks]

    def gradients(self, step: int, update: int) -> dict[str, Tensor]:
        """The gradients of the whole model before an update, merged over all ranks."""
        found: dict[str, Tensor] = {}
        for record in self.ranks:
            found = {**self.tensors(f"grad-{step}-{update}-r{record['rank']}"), **found}
        return {name: grad.double() for name, grad in found.items()}

    def gradients_by_yield(self, step: int) -> list[dict[str, Tensor]]:
        """The gradients of each yield, if one process computed all shards in sequence."""
        sums = [self.tensors(f"part-{step}-{micro}") for micro in range(1, self.step_records(step)[0]["yields"])]
        before: dict[str, Tensor] = {}
        parts = []
        for found in [*sums, self.tensors(f"grad-{step}-0-r0")]:
            parts.append({k: v.double() - before[k].double() if k in before else v.double() for k, v in found.items()})
            before = found
        return parts

    def updates(self, step: int) -> int:
        """The number of updates in the step."""
        return max((record["updates"] for record in self.step_records(step)), default=0)

    def updates_own_gradients(self, step: int) -> bool:
        """Whether this run updates from its own gradients instead of those of the subject run."""
        return any(record.get("own") for record in self.step_records(step))

    def yields(self, step: int) -> int:
        """The number of yields in the step, on the rank with the most."""
        return max((record["yields"] for record in self.step_records(step)), default=0)

    def examples_by_yield(self, step: int) -> list[int]:
        """The number of examples in each yield, for a run of one process."""
        return [len(values) for *_, values in self.step_records(step)[0]["ids"]]

    def example_digests(self, step: int) -> dict[tuple[str, int], str]:
        """(loader, index) -> digest, for the examples of a step."""
        found: dict[tuple[str, int], str] = {}
        for rank in self.step_records(step):
            for (loader, *_, indices), (*_, digests) in zip(rank["ids"], rank["data"], strict=True):
                found |= {(loader, index): digest for index, digest in zip(indices, digests, strict=True)}
        return found

    def example_counts(self, step: int, key: str) -> Counter[Any]:
        """The number of times that each example of a step was computed, over all ranks.

        A part of a batch that several ranks hold counts once.

        key: "ids" for (loader, index), "data" for (loader, digest).
        """
        found: dict[Any, Any] = {}
        for rank in self.step_records(step):
            for *place, values in rank[key]:
                found[tuple(place)] = (place[0], values)
        return Counter((loader, value) for loader, values in found.values() for value in values)

    def losses(self, step: int) -> dict[str, float]:
        """The mean loss of each backward call, over all ranks."""
        sums: dict[str, list[float]] = {}
        for rank in self.step_records(step):
            for call, (total, weight) in rank["losses"].items():
                pair = sums.setdefault(call, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + total, pair[1] + weight
        return {call: total / weight for call, (total, weight) in sums.items() if weight}

    def shard_losses(self, step: int) -> dict[tuple[int, ...], float]:
        """(shard, micro-batch, backward call, term) -> loss."""
        return {tuple(place): loss for rank in self.step_records(step) for *place, loss in rank["shard_losses"]}

    def learning_rates(self, step: int) -> list[float]:
        """The learning rates at the updates of a step, one per group of parameters."""
        return next((list(rank["lrs"]) for rank in self.step_records(step) if rank["lrs"]), [])

    def optimizer_options(self, step: int) -> list[dict[str, Any]]:
        """The settings of the optimizers' groups at the updates of a step."""
        return next((list(rank["options"]) for rank in self.step_records(step) if rank.get("options")), [])

    def called_layers(self, step: int) -> list[list[str]]:
        """Layers in the order of their first call, for each rank that had examples."""
        return [rank["modules"] for rank in self.step_records(step) if rank["data"]]

    def changed_outside(self, step: int) -> set[str]:
        """Tensors that were changed between the last update and this step."""
        return {name for rank in self.step_records(step) for name in rank["outside"]}

    def not_finite(self, step: int) -> list[str]:
        """Parameters with gradients that are not finite in this step."""
        return [name for rank in self.step_records(step) for name in rank["not_finite"]]

    def initial_weights(self) -> dict[str, Tensor]:
        """The weights at the start of the script, before the run loaded any state."""
        return self.tensors("initial") or self.start_state(0)

    def start_state(self, step: int) -> dict[str, Tensor]:
        """The models' state at the start of this step, as saved by the subject run."""
        return self.tensors(f"start-{step}")

    @cached_property
    def drew(self) -> bool:
        """Whether the model drew random numbers in any step."""
        return any(step["drew"] for record in self.ranks for step in record["steps"])

    @cached_property
    def parameters(self) -> list[str]:
        """The names of the parameters."""
        return list(dict.fromkeys(name for record in self.ranks for name in record["parameters"]))

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of parameters and buffers, by name."""
        return {name: dtype for record in self.ranks for name, dtype in record.get("dtypes", {}).items()}

    def roundoff(self, name: str) -> float:
        """The unit roundoff of a parameter or buffer; 0 for integers."""
        dtype = getattr(torch, self.dtypes.get(name, "float32"))
        return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0

    @cached_property
    def weights(self) -> set[str]:
        """All names of parameters. A parameter that several layers share has several names."""
        return {*self.parameters, *(name for record in self.ranks for name in record["tied"])}

    def other_generator_states(self, step: int) -> set[str]:
        """States of NumPy's and Python's generators after the computations of a step."""
        return {state for rank in self.step_records(step) for state in rank["others"]}

    @cached_property
    def gathers(self) -> bool:
        """Whether losses of this run may depend on values of all processes."""
        return any(step["gathered"] for record in self.ranks for step in record["steps"])


@lru_cache(maxsize=64)
def _tensors(path: str) -> dict[str, Tensor]:
    return load_file(path)
