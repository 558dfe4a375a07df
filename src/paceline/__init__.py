"""Paceline: one training script, any number of devices, the same model.

    run = paceline.start()
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(dataset, global_batch=256, shuffle=True)
    for epoch in run.epochs(10):
        for batch in loader:
            loss = run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)

`import paceline` does not load torch. The first use of a name that needs torch loads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import errors
    from paceline.config import strategy
    from paceline.fitting.best import Best
    from paceline.fitting.callbacks import Callback
    from paceline.fitting.evaluate import evaluate, predict
    from paceline.fitting.fit_plan import PerEpoch
    from paceline.fitting.history import Checkpoints, History
    from paceline.fitting.loop import fit
    from paceline.fitting.lr_finder import lr_find
    from paceline.fitting.micro_batch_finder import find_micro_batch
    from paceline.fitting.model_summary import summary
    from paceline.fitting.profiler import Profiler
    from paceline.fitting.weight_averaging import EMA, SWA
    from paceline.launching import launch
    from paceline.run import Run
    from paceline.session import start
    from paceline.step.learning_rate import scale_lr, warmup
    from paceline.step.loss import Total
    from paceline.world import World

    __version__: str

__all__ = [
    "EMA",
    "SWA",
    "Best",
    "Callback",
    "Checkpoints",
    "History",
    "PerEpoch",
    "Profiler",
    "Run",
    "Total",
    "World",
    "__version__",
    "errors",
    "evaluate",
    "find_micro_batch",
    "fit",
    "launch",
    "lr_find",
    "predict",
    "scale_lr",
    "start",
    "strategy",
    "summary",
    "warmup",
]

_HOME = {
    "EMA": "paceline.fitting.weight_averaging",
    "SWA": "paceline.fitting.weight_averaging",
    "Best": "paceline.fitting.best",
    "Callback": "paceline.fitting.callbacks",
    "Checkpoints": "paceline.fitting.history",
    "History": "paceline.fitting.history",
    "PerEpoch": "paceline.fitting.fit_plan",
    "Profiler": "paceline.fitting.profiler",
    "Run": "paceline.run",
    "Total": "paceline.step.loss",
    "World": "paceline.world",
    "evaluate": "paceline.fitting.evaluate",
    "find_micro_batch": "paceline.fitting.micro_batch_finder",
    "fit": "paceline.fitting.loop",
    "launch": "paceline.launching",
    "lr_find": "paceline.fitting.lr_finder",
    "predict": "paceline.fitting.evaluate",
    "scale_lr": "paceline.step.learning_rate",
    "start": "paceline.session",
    "strategy": "paceline.config",
    "summary": "paceline.fitting.model_summary",
    "warmup": "paceline.step.learning_rate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "errors":
        return import_module("paceline.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slower to import than this whole module

    try:
        return version("paceline")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
