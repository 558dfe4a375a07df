"""Public figures of accelerators: peak of dense matrix products, memory, links; and how much of the peak runs reach.

Peaks are of dense bf16 products (fp16 where bf16 is missing), from NVIDIA's data sheets. Links are per device and
direction: NVLink's data-sheet figure counts both directions, so half of it.

The fractions of the peak are hardware FLOP utilization (HFU) of end-to-end training steps: the 10th percentile, the
median and the 90th percentile over the rows of a table in MosaicML's LLM Foundry (scripts/train/benchmarking/README.md,
commit 061f2c7): GPT models of 125 million to 70 billion parameters under FSDP in bf16, most of them on 8 devices. HFU
counts recomputed products, and its denominator includes updates and exposed communication within a node.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.planning.ranges import Range


class DeviceFigures(NamedTuple):
    """One kind of device."""

    flops: float  # peak FLOP/s of dense 16-bit matrix products
    memory: float  # bytes
    bandwidth: float  # bytes/s to the other devices of its node, in one direction
    fraction: Range | None  # fraction of the peak that training reaches; None: no table for this device
    source: str


H100_FRACTION = Range(0.351, 0.413, 0.555)  # table "H100 80GB BF16", 52 rows
A100_FRACTION = Range(0.478, 0.593, 0.737)  # table "A100 80GB with 1600 Gbps node-node interconnect", 61 rows
ANY_FRACTION = Range(0.351, 0.5, 0.737)  # for a device without a table: from the lowest to the highest of the two
FRACTION_SOURCE = "LLM Foundry's benchmark tables (10th percentile, median, 90th percentile)"

DEVICES = {
    "a100": DeviceFigures(312e12, 80e9, 300e9, A100_FRACTION, "NVIDIA A100 data sheet, SXM 80 GB"),
    "a100-40gb": DeviceFigures(312e12, 40e9, 300e9, A100_FRACTION, "NVIDIA A100 data sheet, SXM 40 GB"),
    "a100-pcie": DeviceFigures(312e12, 80e9, 32e9, A100_FRACTION, "NVIDIA A100 data sheet, PCIe 80 GB, no bridge"),
    "h100": DeviceFigures(989e12, 80e9, 450e9, H100_FRACTION, "NVIDIA H100 data sheet, SXM"),
    "h100-pcie": DeviceFigures(756e12, 80e9, 64e9, H100_FRACTION, "NVIDIA H100 data sheet, PCIe, no bridge"),
    "h200": DeviceFigures(989e12, 141e9, 450e9, H100_FRACTION, "NVIDIA H200 data sheet, SXM"),
    "l4": DeviceFigures(121e12, 24e9, 32e9, None, "NVIDIA L4 data sheet"),
    "l40s": DeviceFigures(362e12, 48e9, 32e9, None, "NVIDIA L40S data sheet"),
    "v100": DeviceFigures(125e12, 32e9, 150e9, None, "NVIDIA V100 data sheet, SXM2 32 GB, fp16"),
}

PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "Tesla V100-SXM2-32GB": "v100",
}
"""The name that torch.cuda.get_device_name returns -> the key in DEVICES."""
