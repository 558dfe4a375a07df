"""Names that other libraries use for features of a run or a loader, for AttributeErrors that give Paceline's name."""

from __future__ import annotations

_RUN = {
    "run.main": "is_main is_main_process is_local_main_process is_global_zero is_rank_zero on_main_process",
    "run.rank": "process_index global_rank node_rank",
    "run.local_rank": "local_process_index",
    "run.world_size": "num_processes size num_replicas_in_sync",
    "run.wait()": "wait_for_everyone barrier",
    "run.main_first()": "main_process_first local_main_process_first rank_zero_first",
    "run.gather(values), which accepts different numbers per process": (
        "gather_for_metrics all_gather gather_object allgather"
    ),
    "run.sum(values) or run.mean(values)": "reduce all_reduce allreduce",
    "run.step(optimizer, max_grad_norm=1.0)": "clip_grad_norm_ clip_gradients clip_grad_value_",
    "the model itself, which prepare does not wrap": "unwrap_model unwrap",
    "run.prepare(model, optimizer), and run.loader(dataset, global_batch=...)": "setup setup_module setup_optimizers",
    "run.loader(dataset, global_batch=...)": (
        "setup_dataloaders prepare_data_loader prepare_dataloader experimental_distribute_dataset"
    ),
    "run.loader(..., micro_batch=...), which accumulates gradients automatically": (
        "accumulate no_sync no_backward_sync gradient_accumulation_steps sync_gradients"
    ),
    "run.save(directory) and run.restore(directory)": "save_state load_state save_checkpoint load_checkpoint load",
    "run.save(directory, background=True)": "async_save save_async",
    "run.export(path, model)": "save_model get_state_dict save_pretrained",
    "run.track(name=object)": "register_for_checkpointing",
    "run.log(name=value)": "log_dict init_trackers",
    "run.steps": "global_step step_count",
    "run.broadcast(value)": "broadcast_object broadcast_object_list",
    "run.prepare(model, optimizer), which gives all processes rank 0's weights": (
        "broadcast_parameters broadcast_optimizer_state"
    ),
    "run.forward_backward(loss_fn, model, batch), then run.step(optimizer)": "train_step training_step",
    "paceline.fit(model, loss_fn, dataset, ...)": "fit train",
}

_LOADER = {
    "loader.global_batch, the number of examples per optimizer step over all processes; or loader.examples, the "
    "number of examples in the current yield on this process": "batch_size total_batch_size",
    "run.loader alone, which gives each epoch a different order and splits it over the processes": "set_epoch sampler",
    "the argument that you passed to run.loader": "batch_sampler num_workers collate_fn drop_last pin_memory",
}


def of_run(name: str) -> str:
    """The message of the AttributeError for a name that a Run does not have."""
    return _message("a run", name, _RUN)


def of_loader(name: str) -> str:
    """The message of the AttributeError for a name that a Loader does not have."""
    return _message("a loader of a run", name, _LOADER)


def _message(what: str, name: str, known: dict[str, str]) -> str:
    ours = next((ours for ours, theirs in known.items() if name in theirs.split()), None)
    return f"{what} has no attribute {name!r}." + ("" if ours is None else f" Use {ours}.")
