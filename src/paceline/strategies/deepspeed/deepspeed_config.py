"""DeepSpeed's configuration: Paceline's settings, and what a user's DeepSpeed JSON may add.

Batch, optimizer, schedule, precision and clipping are set in Paceline, as under every strategy; a JSON that sets them
is refused, key by key. It may set how ZeRO works: its stage, its buckets, and so on. Keys:
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import SettingError, suggest

STAGES = (1, 2, 3)
_OURS = {  # refused top-level keys -> what sets it in Paceline
    "train_batch_size": "run.loader(global_batch=...)",
    "train_micro_batch_size_per_gpu": "run.loader(micro_batch=...)",
    "gradient_accumulation_steps": "run.loader(micro_batch=...), from which it follows",
    "gradient_clipping": "run.step(optimizer, max_grad_norm=...)",
    "optimizer": "the optimizer that is given to run.prepare",
    "scheduler": "the scheduler that is given to run.prepare",
    "fp16": "--precision fp16 (or precision='fp16')",
    "bf16": "--precision bf16 (or precision='bf16')",
    "bfloat16": "--precision bf16 (or precision='bf16')",
    "amp": "--precision fp16 (or precision='fp16')",
    "torch_autocast": "--precision bf16 (or precision='bf16')",
}
_PRECISIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
_REDUNDANT = ("zero_allow_untested_optimizer",)  # Paceline sets it too, to the same value
_ALLOWED = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger")
_ZERO = (
    "stage",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "contiguous_gradients",
    "sub_group_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
)
_OFF = ("round_robin_gradients", "zero_quantized_gradients", "zero_quantized_weights")  # allowed where they are off


def merged(path: str, stage: int) -> dict[str, Any]:
    """DeepSpeed's config but for "reduce_bucket_size", which depends on the model where it is not given.

    path: of a JSON, or "" for none. stage: 1, 2 or 3; 0 for the JSON's, or 2 where it says none. Values "auto", which
    other trainers fill in, are as if they were not there. Raises SettingError for what contradicts Paceline's settings.
    """
    if stage and stage not in STAGES:
        raise SettingError(
            f"strategy deepspeed: stage={stage}: 1 (optimizer state in slices), 2 (gradients too) or 3 (parameters "
            "too) is needed."
        )
    given = _without_auto(_read(path)) if path else {}
    for key, value in given.items():
        if key in _OURS and not _means_nothing(key, value):
            raise SettingError(
                f"strategy deepspeed: config={path} says {key}={json.dumps(value)}, which under Paceline is said by "
                f"{_OURS[key]}. Remove {key!r} from the file."
            )
        if key not in (*_OURS, *_REDUNDANT, *_ALLOWED, "zero_optimization"):
            raise SettingError(
                f"strategy deepspeed: config={path}: {key!r} is not taken: it is not known to leave the model the same "
                f"under Paceline. Remove it. {suggest(key, [*_ALLOWED, 'zero_optimization'])}"
            )
    zero = {"stage": stage or 2, "overlap_comm": False, "memory_efficient_linear": False}
    return {
        "train_micro_batch_size_per_gpu": 1,  # losses are weighted already
        "gradient_accumulation_steps": 1,  # every backward is reduced
        "gradient_clipping": 0.0,  # its own default is 1.0
        "zero_allow_untested_optimizer": True,
        **{key: value for key, value in given.items() if key in _ALLOWED},
        "zero_optimization": zero | _zero(given.get("zero_optimization", {}), path, stage),
    }


def _zero(given: Any, path: str, stage: int) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingError(f"strategy deepspeed: config={path}: zero_optimization={given!r}: an object is needed.")
    theirs = given.get("stage", stage)
    if "stage" in given and theirs not in STAGES:
        raise SettingError(
            f"strategy deepspeed: config={path} says zero_optimization.stage={theirs!r}: 1, 2 or 3 is needed. Without "
            "ZeRO (stage 0) take strategy='ddp'."
        )
    if stage and theirs != stage:
        raise SettingError(
            f"strategy deepspeed: stage={stage}, but config={path} says zero_optimization.stage={theirs}. Say it in "
            "one place."
        )
    for key, value in given.items():
        offload = key.startswith("offload_") and isinstance(value, Mapping)
        if (offload and value.get("device", "none") == "none") or (key in _OFF and value is False):
            continue
        if key not in _ZERO:
            raise SettingError(
                f"strategy deepspeed: config={path}: zero_optimization.{key} is not taken: it is not known to leave "
                f"the model the same under Paceline. Remove it. {suggest(key, _ZERO)}"
            )
    return {key: value for key, value in given.items() if key in _ZERO}


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise SettingError(
            f"strategy deepspeed: config={path} cannot be read: {error.strerror}. Give the path of a DeepSpeed JSON."
        ) from error
    except ValueError as error:
        raise SettingError(f"strategy deepspeed: config={path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise SettingError(f"strategy deepspeed: config={path}: an object at the top is needed, as DeepSpeed's own.")
    return found


def _without_auto(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_auto(value) for key, value in config.items() if value != "auto"}
    return config


def _means_nothing(key: str, value: Any) -> bool:
    """Whether a refused key sets nothing: a precision that is off (as it is unless "enabled"), or no clipping."""
    if isinstance(value, Mapping):
        return not value or (key in _PRECISIONS and not value.get("enabled", False))
    return key == "gradient_clipping" and value == 0
