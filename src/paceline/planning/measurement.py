"""Measurement: one step of a script in one process, as worker/step_measure.py records it. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.errors import SettingError
from paceline.planning.ranges import Range

SCHEMA = 1


@dataclass(frozen=True)
class Layer:
    """A layer that fsdp gathers by itself, or that a pipeline can begin a stage at; in the order of the forward."""

    name: str
    parameter_bytes: float
    gradient_bytes: float
    activation_bytes: float  # saved for the backward, of one example
    output_bytes: float  # of one example
    flops: float  # forward and backward of one example


@dataclass(frozen=True)
class TensorCut:
    """The layers that strategy tensor splits over some number of devices."""

    parameter_bytes: float  # of split parameters
    gradient_bytes: float
    flops: float  # of split layers and of attention, one example
    all_reduced_bytes: float  # in the forward and the backward of one example


@dataclass(frozen=True)
class Measurement:
    """One step in one process."""

    script: str
    device: str  # such as "cpu" or "cuda:0"
    precision: str
    examples: int  # of a global batch
    micro_batch: int | None  # the largest number of examples that a replica computes at once; None: its whole shard
    # Seconds of each timed step.
    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    other: Sequence[float]  # between these, such as logging
    parameter_bytes: float
    gradient_bytes: float
    state_bytes: float  # of the optimizers
    buffer_bytes: float
    gathered_bytes: float  # of all parameters in 16 bits, as fsdp:mixed=bf16 gathers them
    activation_bytes: float  # saved for the backward outside of layers, of one example
    input_bytes: float  # that the models are called with, of one example
    flops: float | None  # matrix products and convolutions, forward and backward of one example; None: not counted
    layers: Sequence[Layer] = ()
    cuts: Mapping[int, TensorCut] = field(default_factory=dict)  # number of devices -> split layers
    other_bytes: float = 0.0  # peak of the process, without tensors: interpreter and libraries
    # Most bytes in tensors made in a forward and backward, gradients and activations included:
    loss_live_bytes: float = 0.0  # until the backward reaches a layer
    live_bytes: float = 0.0  # from then on
    update_bytes: float = 0.0  # most bytes in tensors made in an update, beyond those at its beginning

    @property
    def accelerated(self) -> bool:
        return not self.device.startswith("cpu")

    @property
    def outside_bytes(self) -> float:
        """Bytes of the parameters outside of `layers`."""
        return max(self.parameter_bytes - sum(layer.parameter_bytes for layer in self.layers), 0.0)

    @property
    def outside_gradient_bytes(self) -> float:
        return max(self.gradient_bytes - sum(layer.gradient_bytes for layer in self.layers), 0.0)

    @property
    def example_activation_bytes(self) -> float:
        """Bytes that a backward needs of one example."""
        return self.activation_bytes + sum(layer.activation_bytes for layer in self.layers)

    def seconds(self, name: str) -> Range:
        """5th percentile, median and 95th percentile over the timed steps. name: such as "forward"."""
        values = sorted(getattr(self, name))
        last = len(values) - 1
        return Range(values[round(0.05 * last)], statistics.median(values), values[round(0.95 * last)])

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def read_measurement(document: Any, where: str) -> Measurement:
    """Read the object that `paceline plan --json` writes, or its key "measurement". where: its name in messages.

    Raises:
        SettingError: it is not a measurement.
    """
    found = document.get("measurement", document) if isinstance(document, dict) else None
    remedy = "Use a file that `paceline plan --json FILE` wrote."
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise SettingError(f"--from {where}: it has no measurement of this version. {remedy}")
    rest = {key: value for key, value in found.items() if key != "schema"}
    try:
        rest["layers"] = tuple(Layer(**layer) for layer in rest.get("layers", ()))
        rest["cuts"] = {int(size): TensorCut(**cut) for size, cut in rest.get("cuts", {}).items()}
        measurement = Measurement(**rest)
        if measurement.examples < 1 or not all((measurement.forward, measurement.backward, measurement.update)):
            raise ValueError("no step")
    except (TypeError, ValueError, AttributeError) as error:
        raise SettingError(f"--from {where}: the measurement cannot be read ({error}). {remedy}") from None
    return measurement


def read_measurement_file(path: str) -> Measurement:
    """Read a file of `paceline plan --json`. Raises SettingError."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError) as error:
        raise SettingError(f"--from {path}: cannot read it ({error}). Name a file of `paceline plan --json`.") from None
    return read_measurement(document, path)
