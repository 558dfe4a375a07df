"""The public surface is what this list says, and importing it costs nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import paceline
import paceline.errors

EXPORTED = [
    "Best", "Callback", "Checkpoints", "EMA", "History", "PerEpoch", "Profiler", "Run", "SWA", "Total", "World",
    "__version__", "errors", "evaluate", "find_micro_batch", "fit", "launch", "lr_find", "predict", "scale_lr", "start",
    "strategy", "summary", "warmup",
]  # fmt: skip
RUN = {
    "add_tracker", "autocast", "backward", "batches", "broadcast", "close", "compute", "ema", "epochs", "export",
    "forward_backward", "gather", "load_pretrained", "loader", "local_rank", "log", "log_histogram",
    "log_hyperparameters", "log_image", "main", "main_first", "mean", "predict", "prepare", "print", "rank",
    "ratio", "restore", "save", "skipped", "step", "steps", "sum", "track", "wait", "wait_for_save", "world_size",
}  # fmt: skip
START = [
    "strategy", "precision", "seed", "batch_norm", "noise", "compile", "nonfinite", "nonfinite_every", "fp32_outputs",
    "device", "log_dir", "trackers", "log_every", "progress", "trace", "channels_last", "deterministic",
    "cudnn_benchmark", "tf32", "reproducible", "balance", "peak_flops", "init_method", "rank", "world_size",
]  # fmt: skip


def test_the_names_of_the_package() -> None:
    assert sorted(paceline.__all__) == EXPORTED
    assert dir(paceline) == EXPORTED
    for name in EXPORTED:
        assert getattr(paceline, name) is not None


FIT = [
    "model", "loss_fn", "train_set", "optimizer", "global_batch", "epochs", "scheduler", "evaluate_on", "metrics",
    "target", "val_check_interval", "limit_train_batches", "limit_val_batches", "fast_dev_run", "max_grad_norm",
    "checkpoints", "best", "callbacks", "run", "loader_options",
]  # fmt: skip


def test_the_arguments_of_fit() -> None:
    assert list(inspect.signature(paceline.fit).parameters) == FIT


def test_no_module_has_the_name_of_a_function() -> None:
    """Importing paceline.fit.anything would put the module in the function's place."""
    modules = {path.stem for path in Path(paceline.__file__).parent.iterdir()}
    assert not modules & (set(EXPORTED) - {"errors"})


def test_the_methods_of_a_run() -> None:
    assert {name for name in vars(paceline.Run) if not name.startswith("_")} == RUN
    undocumented = [name for name in RUN if not inspect.getdoc(getattr(paceline.Run, name))]
    assert not undocumented


def test_the_arguments_of_start() -> None:
    parameters = inspect.signature(paceline.start).parameters
    assert list(parameters) == START
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in parameters.values())


def test_every_error_is_a_paceline_error_and_in_the_tree() -> None:
    classes = [c for c in vars(paceline.errors).values() if inspect.isclass(c) and c.__module__ == "paceline.errors"]
    assert len(classes) >= 10
    for cls in classes:
        assert issubclass(cls, paceline.errors.PacelineError)
        assert cls.__name__ in (paceline.errors.__doc__ or "")


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(paceline, "Trainer")


def test_importing_is_free_and_silent() -> None:
    code = "import sys, paceline, paceline.errors; print(*(m for m in ('torch', 'numpy', 'rich') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
