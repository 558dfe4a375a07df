"""The task of a trial's workers: written by `paceline compare`, `plan` or `verify`, read by `paceline.start`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from paceline.config import Settings
from paceline.world import TRIAL

PROFILED_STEPS = 6  # steps under torch's profiler, after the timed steps; in the first, ranks wait for each other

# Traits of a run, which a trial of `paceline compare` records.
DRAWS = "draws"  # the model or the loss draws random numbers
NOT_IN_STEP = "not-in-step"  # replicas do not combine all gradients before each update
BATCH_NORM_PER_SHARD = "batch-norm-per-shard"  # batch norm uses the statistics of each shard separately


@dataclass(frozen=True)
class TrialSpec:
    """The task of one trial's workers, passed to them as JSON in an environment variable."""

    directory: str  # each rank N writes `rank-N.json` into this directory
    steps: int  # the number of steps to make and compare
    warmup: int = 0  # the number of steps at the start that are not timed
    launched_at: float = 0.0  # when the launcher started the workers, in seconds since the epoch
    global_batch: int | None = None  # the global batch size; None: the script's
    measures_step: bool = False  # a trial of `paceline plan`: measure and inspect a step of one process
    # For `paceline verify`: the directory of the subject run, with the states that every step starts from. None: a
    # trial of `paceline compare`.
    reference: str | None = None
    is_subject: bool = False  # this is the subject run, which writes these states
    dropout_off: bool = False  # the model's dropout is turned off
    whole_batches: bool = False  # a global batch is one micro-batch
    reversed_batches: bool = False  # each batch's examples come in reverse order
    perturbed: bool = False  # each weight is moved by its last bit, and the loss is scaled in the backward
    # One process replaces the processes of the subject run. The trial's strategy decides how batches are split, even if
    # the script sets `reproducible`.
    single_process: bool = False
    # Only this shard's loss counts in update `only_update` of a step; the other shards' losses are multiplied by zero.
    only_shard: int | None = None
    only_update: int = 0  # see only_shard
    rotated_shards: bool = False  # each rank computes the shard of the next rank
    rank_0_of_1: bool = False  # report rank 0 of 1 to the script
    # Trace the operations of the script's lines (script_tracer.py): those before the first step, and those from step
    # `trace_from` - 1 on. None: no trace.
    trace_from: int | None = None

    # For a script that does not use Paceline (verify/plain):
    processes: int = 1  # the number of processes of the subject run
    separate_batches: bool = False  # one process computes the ranks' batches one after the other, instead of joined
    in_parts: Sequence[str] = ()  # the parameters that each rank holds a part of
    dispatched: bool = False  # rank 0 reads a batch for each rank and sends it
    divided_model: bool = False  # each rank computes a part of the model, on a batch that all ranks have

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TrialSpec | None:
        """Read the spec; None if this run is no trial."""
        text = environ.get(TRIAL)
        return None if not text else cls(**json.loads(text))

    def to_json(self) -> str:
        """The text for the environment variable."""
        return json.dumps(asdict(self))

    def quiet(self, settings: Settings) -> Settings:
        """The settings for a run that shows nothing and writes nothing."""
        reproducible = None if self.single_process else settings.reproducible
        return replace(settings, log_dir=None, progress="off", trace=None, reproducible=reproducible)


class TrialEnded(SystemExit):
    """Ends the script of a trial without an error: the exit code is 0."""
