"""An ONNX file run by onnxruntime, beside the model in PyTorch as it was trained."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import ExportError
from paceline.export.onnx_program import input_names
from paceline.export.user_model import Inputs, run_model
from paceline.torch_private.core import tree_flatten

BATCHES = (1, 7)
"""Numbers of examples that are tried: one, for which shapes are often wrong, and one that no tracing has seen."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""The largest difference that passes, as a share of the largest output. A mistake (a batch size in the graph, a wrong
weight) changes outputs by their own size; what remains below is rounding, which grows with the model's depth."""


class Difference(NamedTuple):
    """How far the file's outputs are from the model's, for one batch."""

    batch: int  # examples
    most: float  # the largest difference of floating outputs
    largest: float  # the largest floating output of the model
    unequal: int  # of other outputs (indices, masks): numbers that are not the same
    of: int  # how many of these there are

    @property
    def share(self) -> float:
        """What the tolerance is compared with."""
        real = self.most / self.largest if self.largest else self.most
        return max(real, self.unequal / self.of if self.of else 0.0)


def available() -> bool:
    """Whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def expected(model: nn.Module, inputs: Inputs, rounded: torch.dtype | None) -> list[list[Tensor]]:
    """The outputs of the model as it was trained, for each of BATCHES.

    rounded: the dtype of the file. The inputs are rounded to it, so that the difference is the file's own.
    """
    own = _dtype(model)
    found = []
    for batch in BATCHES:
        given = inputs.of(batch, rounded).of(batch, own)
        found.append([one for one in tree_flatten(run_model(model, given))[0] if isinstance(one, Tensor)])
    return found


def compare(file: Path, model: nn.Module, inputs: Inputs, outputs: list[list[Tensor]]) -> list[Difference]:
    """Run the file on each of BATCHES, beside `outputs`. model: in the dtype of the file. Raises ExportError where
    onnxruntime cannot run it, or where it is another model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    dtype = _dtype(model)
    found = []
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        for batch, reference in zip(BATCHES, outputs, strict=True):
            given = inputs.of(batch, dtype).tensors
            wanted = {one.name for one in session.get_inputs()}  # an argument that is not used may be left out
            values = zip(input_names(model, inputs), given, strict=True)
            feed = {name: _value(onnxruntime, one) for name, one in values if name in wanted}
            got = [torch.from_numpy(one.numpy()) for one in session.run_with_ort_values(None, feed)]
            found.append(_difference(batch, got, reference))
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"--check: onnxruntime {onnxruntime.__version__} cannot run the file on a CPU: {str(error).strip()}\n"
            "No file was written. Export another --dtype, or with --no-check where another runtime will run it."
        ) from error
    bad = next((one for one in found if not one.share <= TOLERANCE.get(dtype, 1e-3)), None)
    if bad is not None:
        raise ExportError(
            f"--check: the file does not compute what the model does: at batch {bad.batch} outputs differ by up to "
            f"{bad.most:.3g} (the largest is {bad.largest:.3g})"
            + (f", and {bad.unequal} of {bad.of} whole numbers" if bad.of else "")
            + ". No file was written. Does forward() draw random numbers, or keep something from call to call? "
            "--no-check writes it all the same."
        )
    return found


def _difference(batch: int, got: list[Tensor], reference: list[Tensor]) -> Difference:
    if [tuple(one.shape) for one in got] != [tuple(one.shape) for one in reference]:
        shapes = [" ".join(str(tuple(one.shape)) for one in some) for some in (got, reference)]
        raise ExportError(
            f"--check: for a batch of {batch} the file gives outputs of {shapes[0]}, and the model gives {shapes[1]}. "
            "A size that was traced has become a constant: let forward() use x.shape[0] or -1 where it counts examples."
        )
    most = largest = 0.0
    unequal = of = 0
    for own, model in zip(got, reference, strict=True):
        if model.is_floating_point() and model.numel():
            # Equal infinities count as no difference; a NaN that the model does not have is infinitely far.
            distance = torch.where(own.double() == model.double(), 0.0, (own.double() - model.double()).abs())
            distance = torch.where(own.isnan() & model.isnan(), 0.0, distance)
            most = max(most, float(distance.nan_to_num(nan=float("inf")).max()))
            finite = model.double().abs()
            largest = max(largest, float(finite[finite.isfinite()].max()) if finite.isfinite().any() else 0.0)
        elif not model.is_floating_point():
            unequal, of = unequal + int((own != model).sum()), of + model.numel()
    return Difference(batch, most, largest, unequal, of)


def _value(onnxruntime: object, tensor: Tensor) -> object:
    """A tensor as onnxruntime takes it; NumPy has no bfloat16, so that its bits travel."""
    make = onnxruntime.OrtValue  # type: ignore[attr-defined]
    if tensor.dtype == torch.bfloat16:
        return make.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.int16).numpy(), 16)  # TensorProto.BFLOAT16
    return make.ortvalue_from_numpy(tensor.contiguous().numpy())


def _dtype(model: nn.Module) -> torch.dtype:
    """That of the model's first floating parameter or buffer."""
    held = [*model.parameters(), *model.buffers()]
    return next((one.dtype for one in held if one.is_floating_point()), torch.float32)
