"""Recorders: log what a script does, from inside its processes and without reading its source.

A recorder patches functions of torch (paceline/observe/patching.py). A patched function passes its arguments and result
through unchanged, and starts no communication. Each rank writes its events in order to a file
(paceline/observe/event_log.py). rules/ interprets them.

shared_state.py         the state that the recorders share
call_context.py         the lines and names by which a script or a library chooses the data of a call
loader_recorder.py      DataLoaders: indices and digests of the examples, time spent waiting for them
model_recorder.py       DistributedDataParallel, forward passes, batch norm, training mode
fsdp_recorder.py        FullyShardedDataParallel, fully_shard, an optimizer's operations on shards
step_recorder.py        backward, optimizers, schedulers, clipping, GradScaler
draw_recorder.py        random numbers of the training loop, seeds
replica_recorder.py     samples of weights, gradients and optimizer state at some steps
loss_graph.py           the kind and the terms of a loss, from its autograd graph
collective_recorder.py  torch.distributed's collectives, each recorded before it begins
variable_recorder.py    the numbers in the script's variables after an evaluation loop
output_recorder.py      printed, logged and written output; checkpoints
host_sync_recorder.py   calls that wait for the device; threads and cores
"""

from __future__ import annotations

import os
from typing import Any

from paceline.doctor.recorders.shared_state import RecorderState
from paceline.observe.event_log import EventLog
from paceline.observe.script_stack import ScriptStack, module_files


def install(order: dict[str, Any], kind: str, script: str) -> EventLog:
    """Patch torch. Call it once, as soon as torch has been imported.

    Args:
        order: "directory": the folder of the log files. "steps": end the script after this number of optimizer steps;
            None: let it finish.
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
        step_recorder,
        variable_recorder,
    )

    roots = [os.path.realpath(script)] if kind == "script" else [*module_files(script), os.getcwd()]
    shared = RecorderState(order["directory"], int(os.environ.get("RANK", "0")), order.get("steps"))
    log = EventLog(os.path.join(shared.directory, f"rank-{shared.rank}.jsonl"), ScriptStack(roots), shared)
    recorders = (variable_recorder, loader_recorder, model_recorder, fsdp_recorder, step_recorder, collective_recorder)
    for recorder in (*recorders, draw_recorder, output_recorder, host_sync_recorder):
        recorder.install(log)
    return log
