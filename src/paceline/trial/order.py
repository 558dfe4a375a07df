"""What `paceline compare` and `paceline verify` ask of a worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.config import Settings
from paceline.world import TRIAL

PROFILED = 6  # steps under torch's profiler, after those that are timed; the first lets the ranks come together


@dataclass(frozen=True)
class Order:
    """One trial.

    directory: where each rank writes `rank-N.json`. steps: how many are made and compared; the first `warmup` of them
    are not timed. began: when the launcher started the workers, in seconds since the epoch. global_batch: in place of
    the script's own; None: as it is. records: of `paceline verify` (recorder.py): where the run in question has left
    the states that every step starts from, or leaves them (`leads`); None: a trial of `paceline compare`. plain: the
    model's dropout is off. whole: a global batch is one micro-batch. backwards: its examples come in reverse order.
    nudged: each weight is the next number up or down, and the loss is scaled in the backward. alone: one process in
    place of the run in question; it cuts batches as `strategy` says, also where the script sets reproducible.
    only: the shard whose loss counts in that `update` of a step; those of the others are taken times zero. turned: each
    rank computes the shard of the next one. told: the script is told that its process is the only one. lines: what the
    lines of the script do is kept (lines.py), from this step on, and what comes before the first step.
    """

    directory: str
    steps: int
    warmup: int
    began: float
    global_batch: int | None = None
    records: str | None = None
    leads: bool = False
    plain: bool = False
    whole: bool = False
    backwards: bool = False
    nudged: bool = False
    alone: bool = False
    only: int | None = None
    update: int = 0
    turned: bool = False
    told: bool = False
    lines: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Order | None:
        """None in a run that is no trial."""
        text = environ.get(TRIAL)
        return None if not text else cls(**json.loads(text))

    def quiet(self, settings: Settings) -> Settings:
        """The settings of a run that shows and writes nothing."""
        reproducible = None if self.alone else settings.reproducible
        return replace(settings, log_dir=None, progress="off", reproducible=reproducible)
