"""The contenders: tools that train the models. To add one, add it to `contenders`. Does not import torch.

All contenders of a run have the same model, initial weights, order, global batch and optimizer (models.py). Each is
configured as its documentation recommends for CPUs, in float32.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
TENSORFLOW = ROOT / "build" / "tensorflow" / "bin" / "python"
"""A Python with tensorflow, made by `make bench`. PACELINE_TENSORFLOW names another."""

REFERENCE = "one process, all threads"
BY_HAND = "hand-written"
AGAIN = "hand-written, again"
"""The A/A control: the same contender twice."""
ONE_THREAD = "one process, one thread"


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str  # of torch_worker.py's KINDS, or "tensorflow"
    processes: int = 1
    threads: int = 1  # of each process
    strategy: str = ""  # of Paceline
    # The statistics of batch norm: "global" or "shard"; "" with one replica, since both are the same.
    batch_norm: str = ""
    package: str | None = None  # a required package
    peer: bool = False  # whether it is another library to compare Paceline with
    devices: int = 1  # logical devices of tf.distribute's one process

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


def contenders(processes: int) -> list[Contender]:
    """The contenders of a run with this number of processes. They share the cores.

    With one process, the hand-written step has no DistributedDataParallel, and batch norm has one meaning.
    """
    several = processes > 1
    threads = max(1, CORES // processes)
    shard, whole = ("shard", "global") if several else ("", "")
    by_hand = Contender(BY_HAND, "ddp" if several else "plain", processes, threads, batch_norm=shard)
    found = [
        by_hand,
        replace(by_hand, name=AGAIN),
        Contender("Accelerate", "accelerate", processes, threads, batch_norm=shard, package="accelerate", peer=True),
        Contender("Lightning Fabric", "fabric", processes, threads, batch_norm=shard, package="lightning", peer=True),
        Contender("DeepSpeed", "deepspeed", processes, threads, batch_norm=shard, package="deepspeed", peer=True),
        Contender("tf.distribute", "tensorflow", 1, CORES, batch_norm=whole, peer=True, devices=processes),
    ]
    strategies = {"Paceline": "single"}
    if several:
        found[:0] = [Contender(REFERENCE, "plain", threads=CORES), Contender(ONE_THREAD, "plain")]
        strategies = {
            "Paceline ddp": "ddp",
            "Paceline ddp, gloo": f"ddp:reducer=native,{TUNED}",
            "Paceline shared": "shared",
        }
    return found + [
        Contender(name, "paceline", processes, threads, strategy, whole) for name, strategy in strategies.items()
    ]


KINDS = {one.name: one for processes in (1, 2) for one in contenders(processes)}
"""Every contender, by its name."""
