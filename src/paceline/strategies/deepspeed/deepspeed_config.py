"""DeepSpeed's configuration: Paceline's settings, plus keys of a user's DeepSpeed JSON.

Batch, optimizer, schedule, precision and clipping are set in Paceline, as under every strategy. A JSON that sets one of
them is refused. The JSON may set how ZeRO works, such as its stage and its buckets. DeepSpeed documents the keys at
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import SettingError, suggest

STAGES = (1, 2, 3)
_OURS = {  # refused top-level key -> the corresponding setting in Paceline
    "train_batch_size": "run.loader(global_batch=...)",
    "train_micro_batch_size_per_gpu": "run.loader(micro_batch=...)",
    "gradient_accumulation_steps": "run.loader(micro_batch=...)",
    "gradient_clipping": "run.step(optimizer, max_grad_norm=...)",
    "optimizer": "the optimizer passed to run.prepare",
    "scheduler": "the scheduler passed to run.prepare",
    "fp16": "--precision fp16 (or precision='fp16')",
    "bf16": "--precision bf16 (or precision='bf16')",
    "bfloat16": "--precision bf16 (or precision='bf16')",
    "amp": "--precision fp16 (or precision='fp16')",
    "torch_autocast": "--precision bf16 (or precision='bf16')",
}
_PRECISIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
_REDUNDANT = ("zero_allow_untested_optimizer",)  # allowed, since Paceline sets the same value
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
_OFF = ("round_robin_gradients", "zero_quantized_gradients", "zero_quantized_weights")  # allowed if false


def merged(path: str, stage: int) -> dict[str, Any]:
    """DeepSpeed's config, without a default for "reduce_bucket_size", which depends on the model.

    path: the path of a JSON, or "" for none. stage: 1, 2 or 3; 0 for the JSON's stage, or 2 if it has none. Values
    "auto", which other trainers fill in, are ignored. Raises SettingError for a key that conflicts with Paceline's
    settings, or is not supported.
    """
    if stage and stage not in STAGES:
        raise SettingError(
            f"strategy deepspeed: stage={stage}: use 1 (shards optimizer state), 2 (gradients too) or 3 (parameters "
            "too)."
        )
    given = _without_auto(_read(path)) if path else {}
    for key, value in given.items():
        if key in _OURS and not _means_nothing(key, value):
            raise SettingError(
                f"strategy deepspeed: config={path} sets {key}={json.dumps(value)}, but Paceline sets this with "
                f"{_OURS[key]}. Remove {key!r} from the file."
            )
        if key not in (*_OURS, *_REDUNDANT, *_ALLOWED, "zero_optimization"):
            raise SettingError(
                f"strategy deepspeed: config={path}: {key!r} is not supported, since it may change the trained model. "
                f"Remove it. {suggest(key, [*_ALLOWED, 'zero_optimization'])}"
            )
    zero = {"stage": stage or 2, "overlap_comm": False, "memory_efficient_linear": False}
    return {
        "train_micro_batch_size_per_gpu": 1,  # losses are weighted already
        "gradient_accumulation_steps": 1,  # every backward is reduced
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "zero_allow_untested_optimizer": True,
        **{key: value for key, value in given.items() if key in _ALLOWED},
        "zero_optimization": zero | _zero(given.get("zero_optimization", {}), path, stage),
    }


def _zero(given: Any, path: str, stage: int) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingError(f"strategy deepspeed: config={path}: zero_optimization={given!r}: use an object.")
    theirs = given.get("stage", stage)
    if "stage" in given and theirs not in STAGES:
        raise SettingError(
            f"strategy deepspeed: config={path} sets zero_optimization.stage={theirs!r}. Use 1, 2 or 3. Without ZeRO "
            "(stage 0) use strategy='ddp'."
        )
    if stage and theirs != stage:
        raise SettingError(
            f"strategy deepspeed: stage={stage}, but config={path} sets zero_optimization.stage={theirs}. Set it in "
            "one place."
        )
    for key, value in given.items():
        offload = key.startswith("offload_") and isinstance(value, Mapping)
        if (offload and value.get("device", "none") == "none") or (key in _OFF and value is False):
            continue
        if key not in _ZERO:
            raise SettingError(
                f"strategy deepspeed: config={path}: zero_optimization.{key} is not supported, since it may change "
                f"the trained model. Remove it. {suggest(key, _ZERO)}"
            )
    return {key: value for key, value in given.items() if key in _ZERO}


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise SettingError(
            f"strategy deepspeed: config={path} cannot be read: {error.strerror}. Set it to the path of a DeepSpeed "
            "JSON."
        ) from error
    except ValueError as error:
        raise SettingError(f"strategy deepspeed: config={path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise SettingError(f"strategy deepspeed: config={path}: the top level must be an object, as DeepSpeed expects.")
    return found


def _without_auto(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_auto(value) for key, value in config.items() if value != "auto"}
    return config


def _means_nothing(key: str, value: Any) -> bool:
    """Whether a refused key has no effect: an empty object, a precision that is not "enabled", or clipping at 0."""
    if isinstance(value, Mapping):
        return not value or (key in _PRECISIONS and not value.get("enabled", False))
    return key == "gradient_clipping" and value == 0
