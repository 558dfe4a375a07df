"""The report of `paceline env`, for bug reports. Loads torch when called."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from paceline.launcher.plan import available_cores

_PACKAGES = (
    "paceline", "torch", "numpy", "safetensors", "click", "rich", "psutil", "cloudpickle", "torchvision",
    "torchmetrics", "tensorboard", "mlflow", "wandb", "scikit-learn",
)  # fmt: skip
_PREFIXES = (
    "PACELINE", "TORCH", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "PYTORCH_", "CUDA_", "SLURM_", "OMPI_COMM_WORLD_",
    "PMI_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "UCX_", "FI_",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment_report() -> str:
    """Return the report, ending in a newline."""
    import torch

    lines = [
        f"system       {platform.platform()}",
        f"Python       {platform.python_version()} ({sys.executable})",
        f"cores        {available_cores()} usable of {os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
        *_torch(),
        "",
        *(f"{name:<12} {_version(name)}" for name in _PACKAGES),
        "",
        *_variables(os.environ),
    ]
    return "\n".join(lines) + "\n"


def _torch() -> list[str]:
    import torch
    import torch.distributed as dist

    backends = []
    if dist.is_available():
        found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
        backends = [name for name, there in found.items() if there]
    lines = [f"backends     {', '.join(backends) or 'none: this torch has no torch.distributed'}"]
    if torch.version.cuda or torch.version.hip:
        lines.append(f"CUDA         {torch.version.cuda or torch.version.hip}, cuDNN {torch.backends.cudnn.version()}")
        if "nccl" in backends:
            lines.append(f"NCCL         {'.'.join(map(str, torch.cuda.nccl.version()))}")
    else:
        lines.append("CUDA         none in this torch")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            lines.append(
                f"GPU {index:<8} {card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}"
            )
    elif torch.accelerator.is_available():
        lines.append(f"accelerator  {torch.accelerator.current_accelerator()}, {torch.accelerator.device_count()}")
    else:
        lines.append("GPUs         none visible")
    return lines


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _variables(environ: Mapping[str, str]) -> list[str]:
    """List the environment variables that affect a run. Values of secrets are hidden."""
    shown = {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES)}
    return [
        f"{name}={'(set)' if any(word in name for word in _SECRET) else value}" for name, value in shown.items()
    ] or ["no environment variables of launchers or backends"]
