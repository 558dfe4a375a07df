"""What one run of `paceline verify` has left: the records of its ranks, and its tensors."""

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
    """The records of one run, which verify/worker/recorder.py has written.

    Args:
        folder: where the ranks have written. Its last part is the name of the run.
        processes: how many ranks to read.
        first: the first of these ranks.

    Raises:
        FileNotFoundError: a rank has not written.
    """

    def __init__(self, folder: str, processes: int, first: int = 0) -> None:
        self.folder, self.name = folder, os.path.basename(folder)
        records: list[dict[str, Any]] = []
        for rank in range(first, first + processes):
            with open(os.path.join(folder, f"rank-{rank}.json")) as file:
                records.append(json.load(file))
        self.ranks = [record for record in records if record["steps"]] or records  # servers make none

    @cached_property
    def steps(self) -> int:
        """How many steps all ranks have made."""
        return min((len(record["steps"]) for record in self.ranks if record["steps"]), default=0)

    def step_records(self, step: int) -> list[dict[str, Any]]:
        """The records of one step, by rank."""
        return [record["steps"][step] for record in self.ranks if len(record["steps"]) > step]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """A file of named tensors; empty where there is none."""
        path = os.path.join(self.folder, f"{name}.safetensors")
        return _tensors(path) if os.path.exists(path) else {}

    def gradients(self, step: int, update: int) -> dict[str, Tensor]:
        """The gradients of the whole model before an update, of all ranks together."""
        found: dict[str, Tensor] = {}
        for record in self.ranks:
            found = {**self.tensors(f"grad-{step}-{update}-r{record['rank']}"), **found}
        return {name: grad.double() for name, grad in found.items()}

    def gradients_by_yield(self, step: int) -> list[dict[str, Tensor]]:
        """The gradients of each yield, where one process has computed all shards in turn."""
        sums = [self.tensors(f"part-{step}-{micro}") for micro in range(1, self.step_records(step)[0]["yields"])]
        before: dict[str, Tensor] = {}
        parts = []
        for found in [*sums, self.tensors(f"grad-{step}-0-r0")]:
            parts.append({k: v.double() - before[k].double() if k in before else v.double() for k, v in found.items()})
            before = found
        return parts

    def updates(self, step: int) -> int:
        """How many updates the step has."""
        return max((record["updates"] for record in self.step_records(step)), default=0)

    def updates_own_gradients(self, step: int) -> bool:
        """Whether updates follow from each run's own gradients, and not from those of the run in question."""
        return any(record.get("own") for record in self.step_records(step))

    def yields(self, step: int) -> int:
        """How many yields the step has, on the rank with the most."""
        return max((record["yields"] for record in self.step_records(step)), default=0)

    def examples_by_yield(self, step: int) -> list[int]:
        """The number of examples in each yield, of a run of one process."""
        return [len(values) for *_, values in self.step_records(step)[0]["ids"]]

    def example_digests(self, step: int) -> dict[tuple[str, int], str]:
        """(loader, index) -> digest, of the examples of a step."""
        found: dict[tuple[str, int], str] = {}
        for rank in self.step_records(step):
            for (loader, *_, indices), (*_, digests) in zip(rank["ids"], rank["data"], strict=True):
                found |= {(loader, index): digest for index, digest in zip(indices, digests, strict=True)}
        return found

    def example_counts(self, step: int, key: str) -> Counter[Any]:
        """How often each example of a step was computed, over all ranks.

        Several ranks may hold the same part of a batch, which then counts once.

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
        return {tuple(place): loss for rank in self.step_records(step) for *place, loss in rank["apart"]}

    def learning_rates(self, step: int) -> list[float]:
        """The learning rates at the updates of a step, one for each group of parameters."""
        return next((list(rank["lrs"]) for rank in self.step_records(step) if rank["lrs"]), [])

    def optimizer_options(self, step: int) -> list[dict[str, Any]]:
        """The settings of the optimizers' groups at the updates of a step."""
        return next((list(rank["options"]) for rank in self.step_records(step) if rank.get("options")), [])

    def called_layers(self, step: int) -> list[list[str]]:
        """Layers in the order of their first call, of each rank that had examples."""
        return [rank["modules"] for rank in self.step_records(step) if rank["data"]]

    def changed_outside(self, step: int) -> set[str]:
        """Tensors that were changed between the last update and this step."""
        return {name for rank in self.step_records(step) for name in rank["outside"]}

    def not_finite(self, step: int) -> list[str]:
        """Parameters whose gradients are not finite in this step."""
        return [name for rank in self.step_records(step) for name in rank["not_finite"]]

    def initial_weights(self) -> dict[str, Tensor]:
        """The weights with which the script began, before the run took over any state."""
        return self.tensors("initial") or self.start_state(0)

    def start_state(self, step: int) -> dict[str, Tensor]:
        """The models' state from which the run in question made this step."""
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
        """The unit roundoff of a parameter or a buffer; 0 where its numbers are integers."""
        dtype = getattr(torch, self.dtypes.get(name, "float32"))
        return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0

    @cached_property
    def weights(self) -> set[str]:
        """All names of parameters. A parameter that several layers share has several names."""
        return {*self.parameters, *(name for record in self.ranks for name in record["tied"])}

    def other_generator_states(self, step: int) -> set[str]:
        """States of NumPy's and Python's generators after what was computed."""
        return {state for rank in self.step_records(step) for state in rank["others"]}

    @cached_property
    def gathers(self) -> bool:
        """Whether its losses may depend on numbers of all processes."""
        return any(step["gathered"] for record in self.ranks for step in record["steps"])


@lru_cache(maxsize=64)
def _tensors(path: str) -> dict[str, Tensor]:
    return load_file(path)
