"""What is seen of a script from outside its source, in each of its processes.

The watchers stand around torch's own calls. They change no argument and no result, take part in no communication, and
write down what passes, in order, into a file for each rank. What it means is judged afterwards (judge/).

notebook.py     the file, and which line of the script calls
imports.py      to be there when the script imports a module
data.py         DataLoaders and samplers: which examples, how long they were waited for
models.py       DistributedDataParallel, batch norm, the names of parameters
sharded.py      FullyShardedDataParallel, fully_shard
training.py     backward, optimizers, schedulers, clipping, GradScaler
replicas.py     digests of weights, gradients and optimizer state at some steps
losses.py       what a loss is, by its graph
collectives.py  torch.distributed's collectives, each written down before it begins
saying.py       what is printed and logged; checkpoints
waiting.py      synchronisations and empty_cache; threads
"""

from __future__ import annotations

import os
from typing import Any

from paceline.doctor.watch.notebook import Notebook


def install(order: dict[str, Any], kind: str, script: str) -> Notebook:
    """Called once, when torch has been imported. order: "directory" for the files, "steps" or None."""
    from paceline.doctor.watch import collectives, data, models, saying, sharded, training, waiting

    folder = os.path.dirname(os.path.realpath(script)) if kind == "script" else os.getcwd()
    book = Notebook(order["directory"], int(os.environ.get("RANK", "0")), folder, order.get("steps"))
    for watcher in (data, models, sharded, training, collectives, saying, waiting):
        watcher.watch(book)
    return book
