"""Run an ONNX file with onnxruntime, and compare it with the model in PyTorch as it was trained."""

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
"""The tested batch sizes: 1, because shapes are often wrong for it, and 7, which was never traced."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""dtype -> the largest difference that passes, as a fraction of the largest output. A mistake (a constant batch size in
the graph, a wrong weight) causes differences as large as the outputs. Smaller differences come from rounding, which
grows with the model's depth."""


class Difference(NamedTuple):
    """The difference between the file's outputs and the model's, for one batch."""

    batch: int  # examples
    most: float  # the largest difference of floating-point outputs
    largest: float  # the largest floating-point output of the model
    unequal: int  # in other outputs (indices, masks): numbers that differ
    of: int  # how many numbers these other outputs contain

    @property
    def share(self) -> float:
        """The larger of two fractions, to compare with TOLERANCE: the largest difference divided by the largest output,
        and the fraction of unequal numbers in the other outputs."""
        real = self.most / self.largest if self.largest else self.most
        return max(real, self.unequal / self.of if self.of else 0.0)


def available() -> bool:
    """Whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def expected(model: nn.Module, inputs: Inputs, rounded: torch.dtype | None) -> list[list[Tensor]]:
    """The outputs of the model as it was trained, for each size in BATCHES.

    rounded: the dtype of the file; None: as trained. The inputs are rounded to it, so that only the file causes a
    difference.
    """
    own = _dtype(model)
    found = []
    for batch in BATCHES:
        given = inputs.of(batch, rounded).of(batch, own)
        found.append([one for one in tree_flatten(run_model(model, given))[0] if isinstance(one, Tensor)])
    return found


def compare(file: Path, model: nn.Module, inputs: Inputs, outputs: list[list[Tensor]]) -> list[Difference]:
    """Run the file for each size in BATCHES, and compare its results with `outputs`. model: in the dtype of the file.
    Raises ExportError if onnxruntime cannot run the file, or if a difference exceeds TOLERANCE."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    dtype = _dtype(model)
    found = []
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        for batch, reference in zip(BATCHES, outputs, strict=True):
            given = inputs.of(batch, dtype).tensors
            wanted = {one.name for one in session.get_inputs()}  # the file may lack an unused argument
            values = zip(input_names(model, inputs), given, strict=True)
            feed = {name: _value(onnxruntime, one) for name, one in values if name in wanted}
            got = [torch.from_numpy(one.numpy()) for one in session.run_with_ort_values(None, feed)]
            found.append(_difference(batch, got, reference))
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"--check: onnxruntime {onnxruntime.__version__} cannot run the file on a CPU: {str(error).strip()}\n"
            "No file was written. Use another --dtype, or --no-check if another runtime will run it."
        ) from error
    bad = next((one for one in found if not one.share <= TOLERANCE.get(dtype, 1e-3)), None)
    if bad is not None:
        raise ExportError(
            f"--check: the file does not compute the same as the model: at batch {bad.batch} outputs differ by up to "
            f"{bad.most:.3g} (the largest is {bad.largest:.3g})"
            + (f", and {bad.unequal} of {bad.of} integers differ" if bad.of else "")
            + ". No file was written. Does forward() draw random numbers, or keep state between calls? "
            "--no-check writes the file anyway."
        )
    return found


def _difference(batch: int, got: list[Tensor], reference: list[Tensor]) -> Difference:
    if [tuple(one.shape) for one in got] != [tuple(one.shape) for one in reference]:
        shapes = [" ".join(str(tuple(one.shape)) for one in some) for some in (got, reference)]
        raise ExportError(
            f"--check: for a batch of {batch} the file returns outputs of {shapes[0]}, and the model {shapes[1]}. A "
            "traced size has become a constant: use x.shape[0] or -1 for the number of examples in forward()."
        )
    most = largest = 0.0
    unequal = of = 0
    for own, model in zip(got, reference, strict=True):
        if model.is_floating_point() and model.numel():
            # Equal infinities are no difference, nor are two NaN. One NaN is an infinite difference.
            distance = torch.where(own.double() == model.double(), 0.0, (own.double() - model.double()).abs())
            distance = torch.where(own.isnan() & model.isnan(), 0.0, distance)
            most = max(most, float(distance.nan_to_num(nan=float("inf")).max()))
            finite = model.double().abs()
            largest = max(largest, float(finite[finite.isfinite()].max()) if finite.isfinite().any() else 0.0)
        elif not model.is_floating_point():
            unequal, of = unequal + int((own != model).sum()), of + model.numel()
    return Difference(batch, most, largest, unequal, of)


def _value(onnxruntime: object, tensor: Tensor) -> object:
    """Convert a tensor for onnxruntime. NumPy has no bfloat16, so the bits of a bfloat16 tensor are passed as int16."""
    make = onnxruntime.OrtValue  # type: ignore[attr-defined]
    if tensor.dtype == torch.bfloat16:
        return make.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.int16).numpy(), 16)  # TensorProto.BFLOAT16
    return make.ortvalue_from_numpy(tensor.contiguous().numpy())


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first floating-point parameter or buffer."""
    held = [*model.parameters(), *model.buffers()]
    return next((one.dtype for one in held if one.is_floating_point()), torch.float32)
