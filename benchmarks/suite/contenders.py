"""The contenders: tools that train the models. To add one, add a line to CONTENDERS. Does not import torch.

All contenders of a run have the same model, initial weights, order, global batch and optimizer (models.py). Each is
configured as its documentation recommends for CPUs, in float32.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
TENSORFLOW = ROOT / "build" / "tensorflow" / "bin" / "python"
"""A Python with tensorflow, made by `make bench`. PACELINE_TENSORFLOW names another."""

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
    # The statistics of batch norm: "global" or "shard"; "" with one replica, since both are the same.
    batch_norm: str = ""
    package: str | None = None  # a required package
    peer: bool = False  # whether it is another library to compare Paceline with

    def missing(self) -> str | None:
        """The reason why it cannot run here; None if it can."""
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

# Contenders of earlier runs: the file may still hold their figures.
FORMER = [
    Contender("Paceline ddp, shared memory", "paceline", strategy="ddp:reducer=shared_memory", batch_norm="global"),
]
