"""What a worker of a trial is asked to do: written by `paceline compare` or `verify`, read by `paceline.start`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from paceline.config import Settings
from paceline.world import TRIAL

PROFILED_STEPS = 6  # under torch's profiler, after the timed steps; the first one lets the ranks come together

# Traits of a run, which a trial of `paceline compare` records.
DRAWS = "draws"  # the model or the loss draws random numbers
NOT_IN_STEP = "not-in-step"  # replicas do not combine all gradients before each update
BATCH_NORM_PER_SHARD = "batch-norm-per-shard"  # several shards, and each is normalised by its own statistics


@dataclass(frozen=True)
class TrialSpec:
    """One trial. It travels to the workers as JSON, in an environment variable."""

    directory: str  # each rank writes `rank-N.json` there
    steps: int  # how many steps are made and compared
    warmup: int = 0  # the first of these steps, which are not timed
    launched_at: float = 0.0  # when the launcher started the workers, in seconds since the epoch
    global_batch: int | None = None  # in place of the script's own; None: the script's own
    # Of `paceline verify`: the directory of the run in question, with the states that every step starts from. None: a
    # trial of `paceline compare`.
    reference: str | None = None
    in_question: bool = False  # this is the run in question, which writes these states
    dropout_off: bool = False  # the model's dropout drops nothing
    whole_batches: bool = False  # a global batch is one micro-batch
    reversed_batches: bool = False  # each batch's examples come in reverse order
    perturbed: bool = False  # each weight is moved to a neighbouring number, and the loss is scaled in the backward
    # One process in place of the run in question. It cuts batches as `strategy` says, also where the script sets
    # reproducible.
    single_process: bool = False
    # Only this shard's loss counts, in update `only_update` of a step; the other shards' losses are multiplied by zero.
    only_shard: int | None = None
    only_update: int = 0  # see only_shard
    rotated_shards: bool = False  # each rank computes the shard of the next rank
    told_alone: bool = False  # the script is told that its process is the only one
    # Record what the script's lines do (script_tracer.py): before the first step, and from this step on.
    trace_from: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TrialSpec | None:
        """None in a run that is no trial."""
        text = environ.get(TRIAL)
        return None if not text else cls(**json.loads(text))

    def to_json(self) -> str:
        """The text for the environment variable."""
        return json.dumps(asdict(self))

    def quiet(self, settings: Settings) -> Settings:
        """The settings of a run that shows nothing and writes nothing."""
        reproducible = None if self.single_process else settings.reproducible
        return replace(settings, log_dir=None, progress="off", trace=None, reproducible=reproducible)


class TrialEnded(SystemExit):
    """Ends the script of a trial. It is no error: the exit code is 0."""
