"""Recorders: what a script does, seen from its own processes without reading its source.

A recorder patches functions of torch. A patched function passes its arguments and its result on unchanged, and starts
no communication. Each rank records its events in order in a file of its own (event_log.py); rules/ interprets them.

event_log.py            the file of one rank; the script's line that makes a call
code_owner.py           is code the script's, a library's, or of what both stand on?
statements.py           the statement at that line
library_names.py        the names by which a library chooses what it sends
patching.py             replace a function, now or when its module is imported
tensor_digests.py       numbers that stand for a tensor's values
loader_recorder.py      DataLoaders: indices and digests of the examples, time waited for them
model_recorder.py       DistributedDataParallel, forward passes, batch norm, training mode
fsdp_recorder.py        FullyShardedDataParallel, fully_shard
step_recorder.py        backward, optimizers, schedulers, clipping, GradScaler
draw_recorder.py        random numbers of the training loop, seeds
shard_recorder.py       what an optimizer computes of shards
replica_recorder.py     samples of weights, gradients and optimizer state at some steps
loss_graph.py           what a loss is, by its graph
loss_terms.py           the terms that a loss adds up, by its graph
graph_nodes.py          what the nodes of that graph do
collective_recorder.py  torch.distributed's collectives, each recorded before it begins
variable_recorder.py    the numbers in the script's variables after an evaluation's loop
output_recorder.py      printed, logged and written output; checkpoints
host_sync_recorder.py   calls that wait for the device; threads and cores
"""

from __future__ import annotations

import os
from typing import Any

from paceline.doctor.recorders.code_owner import module_files
from paceline.doctor.recorders.event_log import EventLog


def install(order: dict[str, Any], kind: str, script: str) -> EventLog:
    """Patch torch, once, as soon as it has been imported.

    Args:
        order: "directory", where the files go, and "steps", after how many optimizer steps the script ends, or None.
        kind: "script" or "module".
        script: the path of the script, or the module's name.
    """
    from paceline.doctor.recorders import (
        collective_recorder,
        draw_recorder,
        fsdp_recorder,
        host_sync_recorder,
        loader_recorder,
        model_recorder,
        output_recorder,
        shard_recorder,
        step_recorder,
        variable_recorder,
    )

    roots = [os.path.realpath(script)] if kind == "script" else [*module_files(script), os.getcwd()]
    log = EventLog(order["directory"], int(os.environ.get("RANK", "0")), roots, order.get("steps"))
    recorders = (variable_recorder, loader_recorder, model_recorder, fsdp_recorder, step_recorder, collective_recorder)
    for recorder in (*recorders, draw_recorder, shard_recorder, output_recorder, host_sync_recorder):
        recorder.install(log)
    return log
