"""Measures steps of a run in one process, writes a record, and ends the script.

The phases of a trial:

1. The first `warmup` steps are not timed.
2. The other steps, up to `steps`, are timed: forward, backward, update, and the rest of a step. Waiting for data does
   not count. On an accelerator the host waits for it at each border.
3. One more step is inspected: FLOPs, activations, outputs of layers (step_inspection.py).
4. The record is written. Then TrialEnded, a SystemExit, ends the script.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compare.worker.resources import peak_memory
from paceline.data.loader import Loader
from paceline.errors import SettingError
from paceline.planning.worker.step_inspection import MIN_PARAMETERS, TENSOR_SIZES, Inspection, tensors_of
from paceline.run import Run, RunParts
from paceline.step.observer import StepObserver
from paceline.strategies.sharded.fsdp_wrapping import layers_of
from paceline.trials.spec import TrialEnded, TrialSpec


@dataclass
class _Step:
    """Seconds of one step."""

    began: float
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    fetching: float = 0.0  # between the end of one micro-batch and the next one
    ended: float = 0.0
    examples: int = 0
    micro_batches: int = 0
    largest: int = 0  # examples of the largest micro-batch


@dataclass
class _Marks:
    """Points in time within a step."""

    free: float = 0.0  # the end of the last part
    backward: float = 0.0
    closure: float = 0.0  # seconds in the user's closure, during this backward
    before_yield: float = 0.0
    forward: ExitStack = field(default_factory=ExitStack)  # around the forward of the inspected step


class StepMeasure(StepObserver):
    """Observes a run of one process, from its start to its end."""

    def __init__(self, run: Run, parts: RunParts, spec: TrialSpec) -> None:
        self._run, self._parts, self._spec = run, parts, spec
        self._accelerated = run.device.type != "cpu"
        self._steps: list[_Step] = []
        self._current: _Step | None = None
        self._loader: Loader | None = None  # the loader that counts the examples of the current step
        self._micro_batch: int | None = None
        self._marks = _Marks()
        self._inspection: Inspection | None = None
        self._memory: tuple[int, str] | None = None
        self._written = False

    # --- events of the run

    def before_loader(self, dataset: Any, options: dict[str, Any]) -> None:
        if options["train"] and self._micro_batch is None:
            self._micro_batch = options.get("micro_batch")
        if self._spec.global_batch is not None and options["train"]:
            if options.get("batch_sampler") is not None:
                raise SettingError(
                    f"--measured-batch {self._spec.global_batch}: the script's training loader has a batch_sampler, "
                    "which determines the global batch. Leave out --measured-batch."
                )
            options["global_batch"] = self._spec.global_batch

    def before_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if loader.train and request.micro == 0 and (self._current is None or self._current.ended):
            self._complete_step()

    def after_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        if not loader.train:
            return
        now = self._now()
        if self._current is None:
            self._current, self._loader = _Step(now), loader
            if len(self._steps) == self._spec.steps:
                self._begin_inspection()
        elif not self._current.ended:
            self._current.fetching += now - self._marks.free
        if loader is self._loader:
            sizes = [len(part.indices) for part in request.parts]
            self._current.examples += sum(sizes)
            self._current.micro_batches += len(sizes)
            self._current.largest = max(self._current.largest, *sizes)
        self._marks.free = now
        self._begin_forward()

    def closure(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def timed(model: Any, batch: Any) -> Any:
            self._begin_forward()
            began = self._now()
            loss = loss_fn(model, batch)
            self._marks.closure += self._now() - began
            self._end_forward()
            return loss

        return timed

    def in_backward(self, begins: bool) -> None:
        now, current = self._now(), self._current
        if current is None:
            return
        if begins:
            if not self._parts.runs_closure:
                self._end_forward()
            current.forward += now - self._marks.free
            self._marks.backward, self._marks.closure = now, 0.0
        else:
            current.forward += self._marks.closure
            current.backward += now - self._marks.backward - self._marks.closure
        self._marks.free = now

    def before_step(self) -> None:
        self._end_forward()
        if self._inspection is not None:
            self._inspection.begin_update()
        self._marks.free = self._now()

    def after_step(self, acted: bool) -> None:
        now = self._now()
        if acted and self._inspection is not None:
            self._inspection.end_update()
        if acted and self._current is not None:
            self._current.update += now - self._marks.free
            self._current.ended = now
        self._marks.free = now

    def before_close(self) -> None:
        if self._inspection is not None:
            self._end_forward()
            self._inspection.finish()
        self._write_record()

    # --- steps

    def _complete_step(self) -> None:
        if self._current is None:
            return
        self._steps.append(self._current)
        self._current = None
        if len(self._steps) == self._spec.steps:
            self._memory = peak_memory(self._run.device)
        elif len(self._steps) > self._spec.steps:
            assert self._inspection is not None
            self._inspection.finish()
            self._write_record()
            raise TrialEnded(0)

    def _begin_inspection(self) -> None:
        self._inspection = Inspection(self._parts.models, self._layers())
        self._inspection.begin()

    def _begin_forward(self) -> None:
        if self._inspection is not None and self._current is not None:
            self._end_forward()
            self._marks.forward.enter_context(self._inspection.saving())

    def _end_forward(self) -> None:
        self._marks.forward.close()
        if self._inspection is not None:
            self._inspection.end_micro_batch()

    def _now(self) -> float:
        if self._accelerated:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _layers(self) -> dict[str, nn.Module]:
        """Name -> layer, in the order of the modules."""
        found: dict[str, nn.Module] = {}
        for number, model in enumerate(self._parts.models):
            layers = set(layers_of(model, "auto", MIN_PARAMETERS))
            found |= {f"{number}.{name}": module for name, module in model.named_modules() if module in layers}
        return found

    # --- the record

    def _write_record(self) -> None:
        if self._written:
            return
        self._written = True
        document = self._record() if len(self._steps) > self._spec.steps else None
        path = os.path.join(self._spec.directory, f"rank-{self._run.world.rank}.json")
        with open(path + ".part", "w") as file:
            json.dump(document, file)
        os.replace(path + ".part", path)

    def _record(self) -> dict[str, Any]:
        found, step = self._inspection, self._steps[-1]
        assert found is not None
        models, layers = self._parts.models, self._layers()
        every, largest = max(step.examples, 1), max(step.largest, 1)
        parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
        state = [
            tensor
            for optimizer in self._parts.optimizers
            for entry in optimizer.state.values()
            for tensor in tensors_of(entry)
        ]
        sizes = {
            "parameter_bytes": _bytes(parameters),
            "gradient_bytes": _bytes(p for p in parameters if p.requires_grad),
            "state_bytes": _bytes(state),
            "buffer_bytes": _bytes(buffer for model in models for buffer in model.buffers()),
        }
        counted: set[Tensor] = set()
        records = []
        for name, layer in layers.items():
            own = [p for p in layer.parameters() if p not in counted]
            counted |= set(own)
            records.append({
                "name": name.partition(".")[2],
                "parameter_bytes": _bytes(own),
                "gradient_bytes": _bytes(p for p in own if p.requires_grad),
                "activation_bytes": found.activations[name] / largest,
                "output_bytes": found.outputs[name] / every,
                "flops": found.flops_of.get(name, 0.0) / every,
            })  # fmt: skip
        peak, _ = self._memory or peak_memory(self._run.device)
        tensors = sizes["parameter_bytes"] + sizes["state_bytes"] + sizes["buffer_bytes"]
        tensors += max(found.loss_live_bytes, found.live_bytes, sizes["gradient_bytes"] + found.update_bytes)
        timed = self._steps[self._spec.warmup : self._spec.steps]
        return {
            "device": str(self._run.device),
            "precision": self._run.settings.precision or "fp32",
            "examples": step.examples,
            "micro_batch": self._micro_batch,
            "forward": [one.forward for one in timed],
            "backward": [one.backward for one in timed],
            "update": [one.update for one in timed],
            "other": [
                max(one.ended - one.began - one.forward - one.backward - one.update - one.fetching, 0.0)
                for one in timed
            ],
            **sizes,
            "gathered_bytes": sum(2 * p.numel() if p.is_floating_point() else p.nbytes for p in parameters),
            "activation_bytes": found.outside_activations / largest,
            "input_bytes": found.inputs / every,
            "flops": None if found.flops is None else found.flops / every,
            "layers": records,
            "cuts": self._cuts(found, every),
            "loss_live_bytes": found.loss_live_bytes,
            "live_bytes": found.live_bytes,
            "update_bytes": found.update_bytes,
            "other_bytes": max(peak - tensors, 0),
        }

    def _cuts(self, found: Inspection, every: int) -> dict[int, dict[str, float]]:
        """Number of devices -> the layers that tensor would split."""
        cuts = {}
        for size in TENSOR_SIZES:
            plan = found.plans[size]
            if not plan:
                continue
            split = list(dict.fromkeys(p for module, _ in plan.values() for p in module.parameters()))
            in_forward = sum(found.cut_outputs.get(name, 0) for name, (_, kind) in plan.items() if kind == "row")
            in_backward = sum(found.cut_inputs.get(name, 0) for name, (_, kind) in plan.items() if kind != "row")
            flops = sum(found.flops_of.get(name, 0.0) for name in plan) + found.attention_flops
            cuts[size] = {
                "parameter_bytes": _bytes(split),
                "gradient_bytes": _bytes(p for p in split if p.requires_grad),
                "flops": min(flops, found.flops or 0.0) / every,
                "all_reduced_bytes": (in_forward + in_backward) / every,
            }
        return cuts


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
