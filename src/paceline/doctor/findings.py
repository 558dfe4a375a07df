"""The causes that doctor can find, with consequences and remedies; findings as text and JSON. Does not import torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MODEL, COST, NOTE = "model", "cost", "note"

# Sections of docs/troubleshooting.md.
_UNUSED = "expected-to-have-finished-reduction-in-the-prior-iteration"
_HANG = "it-hangs-at-the-end-of-an-epoch"
_FIRST_GPU = "the-first-gpu-is-fuller-than-the-others"
_EMPTY_CACHE = "torchcudaempty_cache"
_DATA = "the-gpus-wait-for-data"
_WORSE = "worse-accuracy-on-more-devices"
_SLOWER = "slower-on-more-devices"


@dataclass(frozen=True)
class Cause:
    """One kind of fault. Its name is its key in CAUSES."""

    kind: str  # MODEL: changes the model; COST: costs time or memory; NOTE: for information
    title: str
    consequence: str  # why it matters
    remedy: str  # the fix, as code if possible
    see: str = ""  # anchor of the section on the symptoms in docs/troubleshooting.md; or ""

    @property
    def page(self) -> str | None:
        """The path and anchor of the section on the symptoms, or None."""
        return f"docs/troubleshooting.md#{self.see}" if self.see else None


@dataclass(frozen=True)
class Finding:
    """A cause that was found in a run."""

    cause: str  # its name in CAUSES
    at: str  # "file:line", or ""
    evidence: str  # the recorded facts, with numbers
    beside: str = ""  # a second "file:line": where the faulty object was made, or a related call; or ""
    fitting: str = ""  # a remedy for this run, if the cause's general remedy does not fit; or ""

    @property
    def about(self) -> Cause:
        return CAUSES[self.cause]

    @property
    def remedy(self) -> str:
        return self.fitting or self.about.remedy

    def as_json(self) -> dict[str, Any]:
        """The finding as `--json` writes it."""
        about = self.about
        file, _, line = self.at.rpartition(":")
        return {
            "cause": self.cause,
            "kind": about.kind,
            "changes_model": about.kind == MODEL,
            "title": about.title,
            "file": file or None,
            "line": int(line) if line.isdecimal() else None,
            "beside": self.beside if self.beside != self.at and self.beside else None,
            "evidence": self.evidence,
            "consequence": about.consequence,
            "remedy": self.remedy,
            "see": about.page,
        }


CAUSES = {
    "same_examples": Cause(
        MODEL,
        "Ranks read the same examples",
        "Each example counts several times. More processes add no data, and an epoch is not one pass over the data.",
        "DataLoader(data, batch_size, sampler=DistributedSampler(data)), without shuffle=True. If the script draws "
        "random batches: torch.Generator().manual_seed(seed + rank).",
        see=_WORSE,
    ),
    "examples_missed": Cause(
        MODEL,
        "Some examples are never used",
        "No rank trains on them: the data are sharded for more ranks than are running, or twice.",
        "Shard by the number of running processes, dist.get_world_size(), not by a constant of the script.",
    ),
    "no_set_epoch": Cause(
        MODEL,
        "set_epoch is never called on the sampler",
        "Every epoch has the same order and the same batches: the data are never reshuffled.",
        "Call sampler.set_epoch(epoch) at the start of each epoch.",
        see=_WORSE,
    ),
    "same_in_workers": Cause(
        MODEL,
        "Each DataLoader worker reads the whole stream",
        "Every example is read once per worker, so an epoch contains the data several times.",
        "Shard the stream by worker as well as by rank. With info = torch.utils.data.get_worker_info(): yield "
        "example i only if i % (world_size * info.num_workers) == rank * info.num_workers + info.id.",
    ),
    "same_random_numbers": Cause(
        MODEL,
        "DataLoader workers draw the same random numbers in every pass",
        "Random augmentation repeats in each epoch, and on all ranks that seed their workers with the same value.",
        "Remove the seeding from worker_init_fn: torch seeds Python, NumPy and torch in the workers for each pass. Or "
        "seed there with torch.initial_seed(), and call torch.manual_seed(seed + rank) on each rank.",
    ),
    "same_noise": Cause(
        MODEL,
        "Ranks draw the same random numbers for different examples",
        "Noise, masks or timesteps repeat on every rank. The gradient of the global batch is noisier than its number "
        "of examples implies, and depends on the number of processes.",
        "After the model is made and wrapped: torch.manual_seed(seed + rank). Or draw from a generator that is seeded "
        "with the rank.",
        see=_WORSE,
    ),
    "same_augmentations": Cause(
        MODEL,
        "DataLoader workers of different ranks draw the same random numbers",
        "Examples at the same position on different ranks get the same augmentation, so augmentation varies less than "
        "it should.",
        "Before the loop: torch.manual_seed(seed + rank). The workers' seeds follow from it. In a worker_init_fn, use "
        "torch.initial_seed(), not a seed that is the same on all ranks.",
        see=_WORSE,
    ),
    "same_batch": Cause(
        MODEL,
        "The DataLoader iterator is re-created every step",
        "The model only ever trains on the first batch.",
        "for batch in loader: ... Or create the iterator once, and re-create it (after sampler.set_epoch) only when it "
        "is exhausted.",
    ),
    "schedule_length": Cause(
        MODEL,
        "A learning-rate schedule does not match the length of training",
        "The learning rate reaches its final value before training ends, or never.",
        "Count this process's updates: epochs * len(loader) // accumulation, where loader is the rank's sharded "
        "loader.",
        see=_WORSE,
    ),
    "padded_evaluation": Cause(
        MODEL,
        "Evaluation counts padded duplicates",
        "Some examples count twice in the metric, which then depends on the number of processes.",
        "Evaluate on shards without padding, Subset(data, range(rank, len(data), world_size)), or drop the duplicates "
        "before computing the metric.",
        see=_WORSE,
    ),
    "weights_differ_at_start": Cause(
        MODEL,
        "Weights differ between ranks at the start",
        "The ranks train different models, and the averaged gradients match none of them.",
        "Wrap the model in DDP after its last change: DDP broadcasts rank 0's weights. Without DDP, dist.broadcast "
        "every parameter and buffer from rank 0, or use the same seed on all ranks before making the model.",
    ),
    "weights_differ": Cause(
        MODEL,
        "Weights diverge between ranks during training",
        "From then on the ranks train different models, and only rank 0's is saved.",
        "Reduce the gradients of all trained parameters (call the DDP module, and exit no_sync before the last "
        "micro-batch). If the script changes weights outside the optimizer, make the same change on all ranks.",
    ),
    "not_reduced": Cause(
        MODEL,
        "No gradient is reduced",
        "Each rank trains an independent model on its shard, and only rank 0's is saved. If ranks broadcast weights "
        "after stepping them, each weight is trained on one rank's shard.",
        "model = DistributedDataParallel(model), and call that model. Or average all gradients over the ranks before "
        "each step.",
    ),
    "past_ddp": Cause(
        MODEL,
        "The forward pass bypasses DDP",
        "DDP only reduces gradients of passes through its own forward. Gradients of direct calls of the wrapped module "
        "stay local to each rank.",
        "Call the DDP module: model(x), not model.module(x) or the module that was wrapped.",
    ),
    "sync_off": Cause(
        MODEL,
        "Gradients are not reduced in the last micro-batch",
        "The optimizer steps with gradients that differ between ranks, and the weights diverge.",
        "Exit no_sync before the last micro-batch of each step (require_backward_grad_sync = True), including in "
        "the incomplete last window of an epoch.",
    ),
    "unknown_to_ddp": Cause(
        MODEL,
        "Trained parameters are unknown to DDP",
        "Their gradients are never reduced, so each rank trains different values.",
        "Create and unfreeze all parameters before DDP wraps the model. If the loss has parameters, put them into the "
        "model, or wrap the loss too.",
    ),
    "partly_reduced": Cause(
        MODEL,
        "Some gradients are reduced, others are not",
        "The other gradients stay local to each rank, and their weights diverge.",
        "Reduce the gradients of every parameter in the optimizer.",
    ),
    "gradients_differ": Cause(
        MODEL,
        "Gradients differ between ranks when the optimizer steps",
        "The ranks make different updates, and their weights diverge.",
        "Between reduction and step, change gradients in the same way on all ranks: no noise, norm or factor that "
        "depends on the rank.",
    ),
    "optimizer_differs": Cause(
        MODEL,
        "The optimizer differs between ranks",
        "Equal gradients lead to different updates, and the weights diverge.",
        "Use the same settings on all ranks, and load the same optimizer state on every rank.",
    ),
    "written_outside": Cause(
        MODEL,
        "Weights are changed outside the optimizer, differently on the ranks",
        "From then on the ranks train different models.",
        "Make the change on every rank with the same values, or dist.broadcast the weights afterwards.",
    ),
    "steps_differ": Cause(
        MODEL,
        "Some ranks skip an optimizer step",
        "A rank that skips a step keeps old weights, so its gradients belong to a different model.",
        "Call optimizer.step() on every rank after the same backward passes, not under `if rank == 0`. If a step must "
        "be skipped, skip it on all ranks.",
    ),
    "loss_mean_of_means": Cause(
        MODEL,
        "The loss averages over counts that differ between ranks",
        "On a rank with fewer tokens (or boxes, or pixels), each one counts more. The gradient is not that of the "
        "mean over the global batch.",
        "Sum the loss, dist.all_reduce(count), and before backward: loss = loss_sum * world_size / count.",
        see=_WORSE,
    ),
    "term_times_processes": Cause(
        MODEL,
        "One term of the loss is multiplied by the number of processes",
        "This term is too large by that factor. The other terms are correct.",
        "Multiply by world_size only the term that is divided by the global count. Leave terms that are means over "
        "the rank's examples alone. (transformers.Trainer: average_tokens_across_devices=False, or divide the "
        "coefficient of this term by the number of processes.)",
        see=_WORSE,
    ),
    "gathered_without_gradient": Cause(
        MODEL,
        "Gathered tensors in the loss have no gradient",
        "The tensors of a rank get no gradient from the losses of the other ranks, as they would in one large batch.",
        "Gather with torch.distributed.nn.functional.all_gather, which keeps the autograd graph.",
    ),
    "factor": Cause(
        MODEL,
        "The loss has a factor that depends on the number of processes",
        "Each gradient is too large or too small by the number of processes, as with another learning rate.",
        "DDP averages the gradients of the ranks. So let each rank compute the mean over its own examples, or "
        "loss_sum * world_size / all_reduced_count.",
        see=_WORSE,
    ),
    "own_fractions": Cause(
        MODEL,
        "One term of the loss is a product of statistics of each rank's rows",
        "It balances each rank's few tokens instead of the tokens of the global batch, so the gradient is different.",
        "all_reduce the fractions (counts and totals) over the ranks before multiplying them by the mean "
        "probabilities. The average of the ranks' gradients is then the gradient of the global loss.",
        see=_WORSE,
    ),
    "modes_differ": Cause(
        MODEL,
        "Ranks train in different modes",
        "On some ranks dropout is off and batch norm uses its running statistics, but not on others. Their "
        "gradients belong to different models.",
        "Call model.train() on every rank before training continues, even if only one rank evaluates.",
    ),
    "buffers_differ": Cause(
        MODEL,
        "Buffers diverge between ranks",
        "Each rank's model computes with statistics of its local data, and only rank 0's are saved.",
        "all_reduce the sums and counts that update the buffer, or let DDP broadcast buffers.",
    ),
    "summed_gradients": Cause(
        MODEL,
        "Gradients are summed over the ranks, not averaged",
        "The effect is that of a learning rate multiplied by the number of processes.",
        "Divide by the number of processes after the sum: grad /= world_size (NCCL: op=ReduceOp.AVG).",
        see=_WORSE,
    ),
    "no_gradient": Cause(
        MODEL,
        "Some parameters never get a gradient",
        "They are not trained, because the loss does not depend on them.",
        "Use them in the forward pass. Or freeze them, parameter.requires_grad_(False), and leave them out of the "
        "optimizer.",
        see=_UNUSED,
    ),
    "lr_differs": Cause(
        MODEL,
        "The learning rate differs between ranks",
        "Equal gradients lead to different updates, and the weights diverge.",
        "Call scheduler.step() on every rank with the same values (ReduceLROnPlateau: an all-reduced metric).",
    ),
    "scheduler_steps": Cause(
        MODEL,
        "A scheduler steps too often",
        "The schedule ends too early, and the rest of the training has the wrong learning rate.",
        "Call scheduler.step() once per epoch or once per optimizer step, in the unit of the schedule's length; never "
        "once per process or micro-batch.",
        see=_WORSE,
    ),
    "lr_scaled_alone": Cause(
        MODEL,
        "The learning rate grows with the number of processes, but the global batch does not",
        "Each update is multiplied by the number of processes, but its gradient averages no more examples than on "
        "one process.",
        "If batch_size // world_size keeps the global batch constant, do not scale the learning rate. Or give each "
        "process the whole batch_size, and scale the learning rate with the global batch.",
        see=_WORSE,
    ),
    "accumulation": Cause(
        MODEL,
        "Accumulated gradients are not divided by the number of micro-batches",
        "The gradient is a sum of means: too large by a factor of the number of micro-batches.",
        "loss = loss / micro_batches before backward, and wrap all micro-batches but the last in model.no_sync().",
    ),
    "clip_before_unscale": Cause(
        MODEL,
        "Gradients are clipped before they are unscaled",
        "The bound applies to gradients times the loss scale, so almost every gradient is clipped to almost nothing.",
        "Call scaler.unscale_(optimizer) before clip_grad_norm_.",
    ),
    "clip_before_reduce": Cause(
        MODEL,
        "Gradients are clipped before they are reduced",
        "The bound applies to each rank's gradient instead of the gradient of the global batch.",
        "Reduce first, then clip.",
    ),
    "norm_summed_twice": Cause(
        MODEL,
        "The clipping norm counts each gradient once per rank",
        "The norm is too large by the square root of the number of processes, so gradients are clipped harder, the "
        "more processes there are.",
        "DDP has averaged the gradients, so each rank already knows the global norm: do not all_reduce it.",
    ),
    "clip_of_shards": Cause(
        MODEL,
        "Each rank scales its gradient shards by a different factor",
        "The shards of one gradient are clipped by different norms. Its direction changes, and depends on the number "
        "of processes.",
        "Clip by the global norm: torch.nn.utils.clip_grad_norm_ supports DTensors. Or all_reduce the sum of squares.",
    ),
    "matrix_of_shard": Cause(
        MODEL,
        "The optimizer treats each rank's shard as if it were the whole matrix",
        "Each shard is orthogonalised (or scaled, or preconditioned) separately. The update differs from that of the "
        "whole matrix, and depends on the number of processes.",
        "Compute on the DTensor itself, as torch.optim.Muon does, or on grad.full_tensor(), and shard the result again "
        "with distribute_tensor. Weights that are not matrices may stay sharded.",
    ),
    "gradients_dropped": Cause(
        MODEL,
        "Gradients of micro-batches are dropped before the step",
        "The step uses only the last micro-batch. The other gradients are computed for nothing.",
        "Call optimizer.zero_grad() once per optimizer step: right after optimizer.step() (also in "
        "accelerator.accumulate), or before the first micro-batch.",
    ),
    "left_over": Cause(
        MODEL,
        "Gradients are left over from the epoch before",
        "The first step of an epoch has too many micro-batches, and the examples count more.",
        "Make a step after the last micro-batch of the epoch, and divide its loss by the number of its micro-batches.",
    ),
    "mean_of_means": Cause(
        MODEL,
        "A metric averages the ranks' means over unequal shards",
        "Examples in smaller shards count more, so the metric depends on the number of processes.",
        "all_reduce the sum and the count, then divide once.",
        see=_WORSE,
    ),
    "local_metric": Cause(
        MODEL,
        "Rank 0's local metric is reported as a global one",
        "It covers only rank 0's shard of the evaluation data. Decisions based on it ignore the rest.",
        "all_reduce the sum and the count before dividing, or evaluate all data on the rank that reports.",
        see=_WORSE,
    ),
    "collectives": Cause(
        MODEL,
        "Ranks call different collectives",
        "NCCL hangs. gloo pairs calls that do not belong together, so the data are silently wrong.",
        "Make the same collective calls in the same order on every rank of a group: none under `if rank == 0`, and "
        "none in a loop whose length differs between ranks. If only one rank evaluates, call ddp_model.module "
        "there.",
        see=_HANG,
    ),
    "find_unused": Cause(
        COST,
        "find_unused_parameters=True is not needed",
        "DDP searches the graph and sends an additional message in every step.",
        "Remove find_unused_parameters=True.",
        see=_UNUSED,
    ),
    "loader_starves": Cause(
        COST, "The devices wait for the DataLoader", "Processes wait for data instead of computing.",
        "Speed up loading: num_workers, prefetch_factor, persistent_workers, less work in __getitem__.",
        see=_DATA,
    ),
    "no_workers": Cause(
        COST, "No DataLoader workers, and the device waits", "Loading and computing do not overlap.",
        "DataLoader(..., num_workers=2) or more.",
        see=_DATA,
    ),
    "no_pinned_memory": Cause(
        COST, "No pinned memory, and the device waits", "Copies to the device do not overlap with computation.",
        "DataLoader(..., pin_memory=True), and batch.to(device, non_blocking=True).",
        see=_DATA,
    ),
    "threads": Cause(
        COST, "More threads than cores", "Threads of the processes compete for cores.",
        "Set OMP_NUM_THREADS (or call torch.set_num_threads) to cores // processes.",
        see=_SLOWER,
    ),
    "one_device": Cause(
        COST, "All ranks use GPU 0", "Its memory holds every rank's context or model, and the other GPUs idle.",
        "Call torch.cuda.set_device(local_rank) first, and torch.load(..., map_location=...).",
        see=_FIRST_GPU,
    ),
    "synchronises": Cause(
        COST, "The host waits for the device in every step", "No work is queued ahead, so the device idles in between.",
        "Read values (.item(), .cpu()) every hundred steps or so, and synchronize only to measure.",
        see=_SLOWER,
    ),
    "empty_cache": Cause(
        COST, "empty_cache is called in the loop", "Memory is freed and allocated again in every step.",
        "Remove the call: the caching allocator reuses memory.",
        see=_EMPTY_CACHE,
    ),
    "no_no_sync": Cause(
        COST, "Gradients are accumulated without no_sync", "Gradients are reduced for every micro-batch, not once.",
        "Wrap forward and backward of all micro-batches but the last in `with model.no_sync():`.",
        see=_SLOWER,
    ),
    "same_checkpoint": Cause(
        COST, "Every rank writes the same checkpoint", "Concurrent writes are slow, and may leave a corrupt file.",
        "if rank == 0: torch.save(...), then dist.barrier() on all ranks.",
    ),
    "module_prefix": Cause(
        COST, "Saved names begin with `module.`", "Only a DDP-wrapped model can load the file.",
        "torch.save(model.module.state_dict(), path).",
    ),
    "batch_norm": Cause(
        NOTE,
        "BatchNorm is not synchronised",
        "Each replica normalises by the statistics of its local shard, not of the global batch, so it is a different "
        "model from the one on a single device. DDP keeps the running statistics of rank 0.",
        "Before DDP, on GPUs: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). Or use GroupNorm or "
        "LayerNorm.",
        see=_WORSE,
    ),
    "same_masks": Cause(
        NOTE, "Dropout draws the same masks on all ranks",
        "The masks repeat on every rank. Many trainers do this by default, and it seldom matters.",
        "For different masks, call torch.manual_seed(seed + rank) after the model is made and wrapped.",
    ),
    "lr_scaled_twice": Cause(
        NOTE, "The learning rate is multiplied by the number of processes more than once",
        "It grows with the square of the number of processes.", "Scale it once, if at all.",
        see=_WORSE,
    ),
    "lr_not_scaled": Cause(
        NOTE, "The global batch grows with the number of processes, but the learning rate does not",
        "There are fewer, less noisy updates per epoch, so training differs from that on one process.",
        "Keep the global batch constant (batch_size // world_size per process), or scale the learning rate "
        "deliberately.",
        see=_WORSE,
    ),
}  # fmt: skip


# --- as text for the terminal

ONE_LINE = ("lr_not_scaled",)  # causes printed in one line: most scripts have them, mostly on purpose
_HEADS = {MODEL: "changes the model", COST: "costs time or memory", NOTE: "note"}


def text(found: Sequence[Finding], steps: int, processes: int) -> str:
    """All findings as text, with a last line that counts them."""
    asides = [finding for finding in found if finding.cause in ONE_LINE]
    listed = [finding for finding in found if finding.cause not in ONE_LINE]
    parts = [_one(number, finding) for number, finding in enumerate(listed, 1)]
    counts = {kind: sum(f.about.kind == kind for f in found) for kind in _HEADS}
    watched = f"watched {steps} steps on {processes} processes"
    if not found:
        return f"paceline doctor: {watched}: nothing found.\n"
    said = [f"{n} change{'s' if n == 1 else ''} the model" for n in [counts[MODEL]] if n]
    said += [f"{n} cost{'s' if n == 1 else ''} time or memory" for n in [counts[COST]] if n]
    said += [f"{n} note{'' if n == 1 else 's'}" for n in [counts[NOTE]] if n]
    last = f"paceline doctor: {watched}. Findings: {', '.join(said)}.\n"
    return "\n".join([*parts, *map(_aside, asides), last])


def _aside(finding: Finding) -> str:
    where = f"{finding.at}: " if finding.at else ""
    return f"{where}{finding.evidence}.  [{finding.cause}: {_HEADS[finding.about.kind]}]\n"


def _one(number: int, finding: Finding) -> str:
    about = finding.about
    where = f"{finding.at}: " if finding.at else ""
    lines = [f"{number}. {where}{about.title}  [{finding.cause}: {_HEADS[about.kind]}]"]
    if finding.beside and finding.beside != finding.at:
        lines.append(f"   also:     {finding.beside}")
    for name, value in (("seen", finding.evidence), ("effect", about.consequence), ("fix", finding.remedy)):
        lines.append(
            textwrap.fill(value, 116, initial_indent=f"   {name + ':':10}", subsequent_indent=" " * 13)
        )  # fmt: skip
    if about.page is not None:
        lines.append(f"   more:     {about.page}")
    return "\n".join(lines) + "\n"
