"""Who trains the models, and how each is started. A further one is a line in CONTENDERS. Imports no torch.

All of one run have the same model, first weights, order, global batch and optimizer (models.py). Each is set up as its
own documentation says is best on CPUs, in float32.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
TENSORFLOW = ROOT / "build" / "tensorflow" / "bin" / "python"
"""A Python that has tensorflow; `make bench` makes it. PACELINE_TENSORFLOW names another."""

REFERENCE = "one process, all threads"
BY_HAND = "DDP by hand"
AGAIN = "DDP by hand, again"
"""The A/A control: the same contender twice."""
ONE_THREAD = "one process, one thread"


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # of torch_worker.py's KINDS, or "tensorflow"
    processes: int = 2
    threads: int = 1  # of each process; of tf.distribute, logical devices and threads of its one process
    strategy: str = ""  # of Paceline
    # Whose the statistics of batch norm are: "global", "shard"; "" with one replica, where both are the same.
    batch_norm: str = ""
    package: str | None = None  # that it needs
    peer: bool = False  # is it another library, with which Paceline is compared?

    def missing(self) -> str | None:
        """Why it cannot be run here; None: it can."""
        if self.kind == "tensorflow":
            python = tensorflow_python()
            return None if python.exists() else f"there is no {python}: make bench installs TensorFlow there"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.kind == "paceline":
            from paceline.config import parse_strategy
            from paceline.strategies import check

            try:
                check(parse_strategy(self.strategy), self.processes, None)
            except Exception as error:
                return str(error).splitlines()[0]
        return None


def tensorflow_python() -> Path:
    return Path(os.environ.get("PACELINE_TENSORFLOW", TENSORFLOW))


TUNED = "gradient_as_bucket_view=true,static_graph=true"

CONTENDERS = [
    Contender(REFERENCE, "plain", processes=1, threads=CORES),
    Contender(ONE_THREAD, "plain", processes=1),
    Contender(BY_HAND, "ddp", batch_norm="shard"),
    Contender(AGAIN, "ddp", batch_norm="shard"),
    Contender("Accelerate", "accelerate", batch_norm="shard", package="accelerate", peer=True),
    Contender("Lightning Fabric", "fabric", batch_norm="shard", package="lightning", peer=True),
    Contender("DeepSpeed", "deepspeed", batch_norm="shard", package="deepspeed", peer=True),
    Contender("tf.distribute", "tensorflow", processes=1, threads=2, batch_norm="global", peer=True),
    Contender("Paceline ddp", "paceline", strategy="ddp", batch_norm="global"),
    Contender("Paceline ddp, gloo", "paceline", strategy=f"ddp:reducer=native,{TUNED}", batch_norm="global"),
    Contender("Paceline shared", "paceline", strategy="shared", batch_norm="global"),
]

# Those of earlier runs: a file that is added to may still hold their figures.
FORMER = [
    Contender("Paceline ddp, shared memory", "paceline", strategy="ddp:reducer=shared_memory", batch_norm="global"),
]
