"""The causes that doctor can find, with what each leads to and what to do; findings, as text and JSON. No torch."""

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
    """A cause; CAUSES has its name."""

    kind: str  # MODEL: it changes the model; COST: time or memory; NOTE: to know
    title: str
    consequence: str  # what it leads to
    remedy: str  # what to do
    see: str = ""  # the section of docs/troubleshooting.md on what the user notices of it, by its anchor; or ""

    @property
    def page(self) -> str | None:
        """Where that section is, or None."""
        return f"docs/troubleshooting.md#{self.see}" if self.see else None


@dataclass(frozen=True)
class Finding:
    """A cause that was found in this run."""

    cause: str  # its name
    at: str  # "file:line", or ""
    evidence: str  # what was recorded, with numbers
    beside: str = ""  # a second line, where what is at fault was made, or of a call that matters; or ""
    fitting: str = ""  # what to do in this run, where the cause's own remedy does not fit; or ""

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
        "Each example counts several times; more processes add no data, and an epoch is not what it says.",
        "Give the training DataLoader a DistributedSampler (and no shuffle=True); draw random batches from a generator "
        "that is seeded with the rank too.",
        see=_WORSE,
    ),
    "examples_missed": Cause(
        MODEL,
        "The data are cut for more ranks than there are",
        "The examples of the ranks that are not there are never seen.",
        "Cut the data by the number of processes that run (dist.get_world_size()), not by a number of the script's.",
    ),
    "no_set_epoch": Cause(
        MODEL,
        "A sampler without set_epoch",
        "Every epoch has the same order, and the same batches: the data are never shuffled anew.",
        "Call sampler.set_epoch(epoch) before each epoch's loop.",
        see=_WORSE,
    ),
    "same_in_workers": Cause(
        MODEL,
        "Each worker of the loader reads the whole stream",
        "Every example comes once for each worker: an epoch is several.",
        "Cut the stream by torch.utils.data.get_worker_info() too: every (rank * num_workers + worker)th example.",
    ),
    "same_random_numbers": Cause(
        MODEL,
        "Workers of the loader draw the same random numbers in every pass",
        "What they augment by them comes again in each epoch, and on every rank that seeds them alike.",
        "Leave the workers' seeds to torch, which seeds Python, NumPy and torch in them anew for each pass; or seed by "
        "torch.initial_seed() in worker_init_fn, with another torch.manual_seed on each rank.",
    ),
    "same_noise": Cause(
        MODEL,
        "Ranks draw the same random numbers for different examples",
        "The noise, masks or timesteps of a global batch repeat on every rank: the gradient is noisier than one of so "
        "many examples should be, and changes with the number of processes.",
        "Seed with the rank after the model is made and wrapped, torch.manual_seed(seed + rank), or draw from a "
        "generator that is seeded with the rank.",
        see=_WORSE,
    ),
    "same_augmentations": Cause(
        MODEL,
        "Workers of different ranks draw the same random numbers",
        "The examples of a rank are augmented just as those at the same place on every other rank: augmentation varies "
        "less than the number of examples says.",
        "Seed with the rank before the loop, torch.manual_seed(seed + rank): the workers' seeds follow from it. In a "
        "worker_init_fn take torch.initial_seed(), and nothing that is the same on all ranks.",
        see=_WORSE,
    ),
    "same_batch": Cause(
        MODEL,
        "The DataLoader iterator is made anew in every step",
        "The model trains on the loader's first batch alone.",
        "Iterate: `for batch in loader`, or make the iterator once, and anew (after set_epoch) when it is at its end.",
    ),
    "schedule_length": Cause(
        MODEL,
        "A schedule is not as long as the training",
        "The rate is over before the training's end, or never comes down.",
        "Count the updates that this process makes: epochs * len(loader) // accumulation, of the loader as it is used.",
        see=_WORSE,
    ),
    "padded_evaluation": Cause(
        MODEL,
        "Evaluation counts padded duplicates",
        "Some examples count twice in the metric, and it changes with the number of processes.",
        "Evaluate on shards without padding (indices[rank::world_size] in a Subset or an own sampler), or drop the "
        "duplicates before the metric is computed.",
        see=_WORSE,
    ),
    "batch_norm": Cause(
        MODEL,
        "BatchNorm is not synchronised",
        "Each replica normalises by the statistics of its own few examples: another model than with the whole batch on "
        "one device. DDP keeps rank 0's running statistics.",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP (on GPUs), or GroupNorm or LayerNorm.",
        see=_WORSE,
    ),
    "weights_differ_at_start": Cause(
        MODEL,
        "Weights differ between ranks at the start",
        "The ranks train different models; averaging their gradients trains none of them.",
        "Make the weights one before the first step: DDP does when it wraps the model last; otherwise broadcast every "
        "parameter and buffer from rank 0, or seed all ranks alike before the model is made.",
    ),
    "weights_differ": Cause(
        MODEL,
        "Weights come to differ between ranks during training",
        "The ranks train different models from there on; what is saved is rank 0's alone.",
        "Reduce the gradients of all trained parameters (call the DDP module itself, leave no_sync for the last "
        "micro-batch), and change weights outside the optimizer alike on all ranks.",
    ),
    "not_reduced": Cause(
        MODEL,
        "No gradient is reduced",
        "Each rank trains a model of its own, and what is saved is rank 0's, trained on its shard alone. Where ranks "
        "send each other weights that they have stepped, each weight is trained on one rank's shard alone.",
        "Wrap the model in DistributedDataParallel and call that, or average all gradients over the ranks before each "
        "step.",
    ),
    "past_ddp": Cause(
        MODEL,
        "The forward goes past DDP",
        "DDP reduces what its own forward has prepared; gradients of a call of the module inside stay each rank's own.",
        "Call the DDP module itself: model(x), not model.module(x), nor the module that was wrapped.",
    ),
    "sync_off": Cause(
        MODEL,
        "Gradients are not reduced in the last micro-batch",
        "The optimizer steps with each rank's own gradients, and the weights part.",
        "Leave no_sync (require_backward_grad_sync = True) for the last micro-batch before each step, also in an "
        "epoch's incomplete last window.",
    ),
    "unknown_to_ddp": Cause(
        MODEL,
        "Parameters that DDP does not know are trained",
        "Their gradients are never reduced: each rank trains its own values of them.",
        "Make and unfreeze all parameters before DDP wraps the model; put a loss's own parameters into the model, or "
        "wrap the loss too.",
    ),
    "partly_reduced": Cause(
        MODEL,
        "Some gradients are reduced, others are not",
        "Those that are left out stay each rank's own, and their weights part.",
        "Reduce the gradients of every parameter of the optimizer.",
    ),
    "gradients_differ": Cause(
        MODEL,
        "Gradients differ between ranks when the optimizer steps",
        "The ranks make different updates, and their weights part.",
        "Between the reduction and the step change gradients alike on all ranks: no noise, norm or factor of a rank's "
        "own.",
    ),
    "optimizer_differs": Cause(
        MODEL,
        "The optimizer differs between ranks",
        "The same gradients make different updates, and the weights part.",
        "Give all ranks the same settings, and load the same optimizer state on every rank.",
    ),
    "written_outside": Cause(
        MODEL,
        "Weights are changed outside the optimizer, and not alike on all ranks",
        "The ranks train different models from there on.",
        "Make the change on every rank with the same values, or broadcast the weights after it.",
    ),
    "steps_differ": Cause(
        MODEL,
        "Ranks do not step the optimizer together",
        "A rank that does not step keeps old weights, and its gradients belong to another model.",
        "Call optimizer.step() on every rank after the same backward passes: not under `if rank == 0`, and skip a step "
        "only where all ranks do.",
    ),
    "loss_mean_of_means": Cause(
        MODEL,
        "The loss is the mean of the ranks' means over unequal numbers",
        "Tokens (or boxes, or pixels) of a rank that has fewer count more: the gradient is not that of the mean over "
        "the whole batch.",
        "Sum the loss, all_reduce the count, and multiply by world_size / count before backward.",
        see=_WORSE,
    ),
    "term_times_processes": Cause(
        MODEL,
        "A term of the loss counts once for each process",
        "That term is as many times too large as there are processes; the others are right.",
        "Multiply by world_size only the term whose sum is divided by the global count; leave a rank's means as they "
        "are. (transformers.Trainer: average_tokens_across_devices=False, or the term's coefficient divided by the "
        "number of processes.)",
        see=_WORSE,
    ),
    "own_fractions": Cause(
        MODEL,
        "A term of the loss is a product of statistics of each rank's own rows",
        "The balance of each rank's few tokens is asked for, and not that of the global batch: another gradient.",
        "all_reduce the fractions (counts and totals) over the ranks before they multiply the mean probabilities: then "
        "the average of the ranks' gradients is the gradient of the global loss.",
        see=_WORSE,
    ),
    "modes_differ": Cause(
        MODEL,
        "Ranks train in different modes",
        "On some ranks dropout is off and batch norm uses its running statistics, on others not: their gradients are "
        "those of different models.",
        "Call model.train() on every rank before it trains on, where one rank alone evaluates too.",
    ),
    "buffers_differ": Cause(
        MODEL,
        "Buffers come to differ between ranks",
        "Each rank's model computes with statistics of its own data; rank 0's are saved.",
        "Reduce what the buffer is updated with (all_reduce of sums and counts), or let DDP broadcast buffers.",
    ),
    "summed_gradients": Cause(
        MODEL,
        "Gradients are summed over the ranks and not divided",
        "The update is that of a learning rate times the number of processes.",
        "Divide by the number of processes after the sum (ReduceOp.AVG with NCCL).",
        see=_WORSE,
    ),
    "no_gradient": Cause(
        MODEL,
        "Parameters without gradients",
        "They are never trained: the loss does not reach them.",
        "Use them in the forward pass, or say that they are not trained: requires_grad_(False), and leave them out of "
        "the optimizer.",
        see=_UNUSED,
    ),
    "lr_differs": Cause(
        MODEL,
        "The learning rate differs between ranks",
        "Ranks apply other updates to the same gradients, and their weights part.",
        "Step the scheduler on every rank, with the same values (ReduceLROnPlateau: a metric that was reduced).",
    ),
    "scheduler_steps": Cause(
        MODEL,
        "A scheduler is stepped too often",
        "The learning rate runs through its schedule too early; the rest of the training has another rate than meant.",
        "Step it once per epoch or once per optimizer step, whichever its lengths are counted in, and never once per "
        "process or micro-batch.",
        see=_WORSE,
    ),
    "lr_scaled_alone": Cause(
        MODEL,
        "The learning rate grows with the processes, and the global batch does not",
        "Each update is as many times larger as there are processes, of a gradient over as many examples as on one.",
        "Where batch_size // world_size keeps the global batch, leave the rate as it is; or give each process the "
        "whole batch size, and scale the rate with the global batch.",
        see=_WORSE,
    ),
    "accumulation": Cause(
        MODEL,
        "Gradients are accumulated without division",
        "The gradient is a sum of means: as many times too large as there are micro-batches.",
        "Divide the loss by the number of micro-batches, and wrap all but the last in model.no_sync().",
    ),
    "clip_before_unscale": Cause(
        MODEL,
        "Gradients are clipped before they are unscaled",
        "The bound is applied to gradients times the loss scale: nearly everything is clipped to almost nothing.",
        "Call scaler.unscale_(optimizer) before clip_grad_norm_.",
    ),
    "clip_before_reduce": Cause(
        MODEL,
        "Gradients are clipped before they are reduced",
        "Each rank's gradient is bounded by itself, and not that of the global batch.",
        "Reduce first, then clip.",
    ),
    "clip_of_shards": Cause(
        MODEL,
        "Each rank scales its parts of the gradients by a number of its own",
        "The parts of one gradient are clipped by different norms: its direction changes, with the processes.",
        "Clip by the norm of the whole: torch.nn.utils.clip_grad_norm_ knows DTensors; or all_reduce the squares.",
    ),
    "matrix_of_shard": Cause(
        MODEL,
        "The optimizer computes of each rank's shard what is meant of the whole matrix",
        "Each shard is orthogonalised (or scaled, or preconditioned) by itself: another update, which changes with the "
        "number of processes.",
        "Compute of the whole: on the DTensor itself, whose operations know its shards (torch.optim.Muon does), or of "
        "grad.full_tensor(), cut again afterwards (distribute_tensor). Weights that are not matrices may stay sharded.",
    ),
    "gradients_dropped": Cause(
        MODEL,
        "Gradients of micro-batches are dropped before the step",
        "The step uses the last micro-batch alone; the others are computed in vain.",
        "Call zero_grad() once for each optimizer step: right after optimizer.step() (in accelerator.accumulate too), "
        "or before its first micro-batch.",
    ),
    "mean_of_means": Cause(
        MODEL,
        "A metric is the mean of the ranks' means over unequal shards",
        "Examples of the smaller shards count more, and the metric changes with the number of processes.",
        "all_reduce sums and counts, and divide once.",
        see=_WORSE,
    ),
    "local_metric": Cause(
        MODEL,
        "A metric of rank 0 is logged as if it were global",
        "It is computed from rank 0's shard of the evaluation data; choices made by it ignore the rest.",
        "all_reduce the sums and the counts before dividing, or evaluate on all data on the rank that logs.",
        see=_WORSE,
    ),
    "collectives": Cause(
        MODEL,
        "Ranks call different collectives",
        "NCCL hangs, gloo pairs calls that do not belong together: data are silently wrong.",
        "Let every rank of a group make the same collective calls in the same order: none behind `if rank == 0`, none "
        "in a loop of unequal length. Call ddp_model.module where only one rank evaluates.",
        see=_HANG,
    ),
    "find_unused": Cause(
        COST,
        "find_unused_parameters=True for nothing",
        "DDP searches the graph and sends one more message in every step.",
        "Leave find_unused_parameters out.",
        see=_UNUSED,
    ),
    "loader_starves": Cause(
        COST, "The loader starves the devices", "The processes wait for data instead of computing.",
        "More or cheaper loading: num_workers, prefetch_factor, persistent_workers, work moved out of __getitem__.",
        see=_DATA,
    ),
    "no_workers": Cause(
        COST, "No loader workers where the device waits", "Loading and computing take turns.",
        "Give the DataLoader num_workers=2 or more.",
        see=_DATA,
    ),
    "no_pinned_memory": Cause(
        COST, "No pinned memory where the device waits", "Copies to the device cannot overlap with computing.",
        "pin_memory=True, and .to(device, non_blocking=True).",
        see=_DATA,
    ),
    "threads": Cause(
        COST, "More threads than cores", "Threads of the processes push each other off the cores.",
        "Set OMP_NUM_THREADS (or torch.set_num_threads) to cores divided by processes.",
        see=_SLOWER,
    ),
    "one_device": Cause(
        COST, "GPU 0 is used by all ranks", "Its memory holds every rank's context or model; the others idle.",
        "torch.cuda.set_device(local_rank) first of all, and torch.load(..., map_location=...).",
        see=_FIRST_GPU,
    ),
    "synchronises": Cause(
        COST, "The host waits for the device in every step", "Nothing is queued ahead, and the device idles between.",
        "Read values every hundred steps or so, and synchronize only to measure.",
        see=_SLOWER,
    ),
    "empty_cache": Cause(
        COST, "empty_cache in the loop", "Memory is given back and asked for again in every step.",
        "Leave it out: the caching allocator reuses memory.",
        see=_EMPTY_CACHE,
    ),
    "no_no_sync": Cause(
        COST, "Gradients are accumulated without no_sync", "Gradients are sent for every micro-batch; once is enough.",
        "Wrap all micro-batches but the last, forward and backward, in `with model.no_sync():`.",
        see=_SLOWER,
    ),
    "same_checkpoint": Cause(
        COST, "Every rank writes the same checkpoint", "The file is written several times, at once: slow, and torn.",
        "Save on rank 0 only, and let the others wait at a barrier.",
    ),
    "module_prefix": Cause(
        COST, "`module.` in a saved state", "Only a model that DDP wraps can load it.",
        "Save model.module.state_dict().",
    ),
    "same_masks": Cause(
        NOTE, "Dropout draws the same masks on all ranks",
        "The masks of a global batch repeat on every rank. Many trainers do so by default, and it seldom matters.",
        "torch.manual_seed(seed + rank) after the model is made and wrapped gives each rank its own.",
    ),
    "lr_scaled_twice": Cause(
        NOTE, "The learning rate is multiplied by the number of processes more than once",
        "It grows with the square of the processes.", "Scale once, if at all.",
        see=_WORSE,
    ),
    "lr_not_scaled": Cause(
        NOTE, "The global batch grows with the processes, and the learning rate does not",
        "Fewer updates per epoch with less noise: training is another one than on one process.",
        "Keep the global batch (batch_size // world_size per process), or scale the rate on purpose.",
        see=_WORSE,
    ),
}  # fmt: skip


# --- as text for the terminal

ONE_LINE = ("lr_not_scaled",)  # causes that are true of most scripts, and mostly meant
_HEADS = {MODEL: "changes the model", COST: "costs time or space", NOTE: "to know"}


def text(found: Sequence[Finding], steps: int, processes: int) -> str:
    """All findings, and a last line with their numbers."""
    asides = [finding for finding in found if finding.cause in ONE_LINE]
    listed = [finding for finding in found if finding.cause not in ONE_LINE]
    parts = [_one(number, finding) for number, finding in enumerate(listed, 1)]
    counts = {kind: sum(f.about.kind == kind for f in found) for kind in _HEADS}
    watched = f"watched {steps} steps on {processes} processes"
    if not found:
        return f"paceline doctor: {watched}: nothing found.\n"
    said = [f"{n} that change{'s' if n == 1 else ''} the model" for n in [counts[MODEL]] if n]
    said += [f"{n} that cost{'s' if n == 1 else ''} time or space" for n in [counts[COST]] if n]
    said += [f"{n} to know" for n in [counts[NOTE]] if n]
    last = f"paceline doctor: {watched}: {', '.join(said)}.\n"
    return "\n".join([*parts, *map(_aside, asides), last])


def _aside(finding: Finding) -> str:
    where = f"{finding.at}: " if finding.at else ""
    return f"{where}{finding.evidence}.  [{finding.cause}: {_HEADS[finding.about.kind]}]\n"


def _one(number: int, finding: Finding) -> str:
    about = finding.about
    where = f"{finding.at}: " if finding.at else ""
    lines = [f"{number}. {where}{about.title}  [{finding.cause}: {_HEADS[about.kind]}]"]
    if finding.beside and finding.beside != finding.at:
        lines.append(f"   with {finding.beside}")
    for name, value in (("seen", finding.evidence), ("leads to", about.consequence), ("do", finding.remedy)):
        lines.append(
            textwrap.fill(value, 116, initial_indent=f"   {name + ':':10}", subsequent_indent=" " * 13)
        )  # fmt: skip
    if about.page is not None:
        lines.append(f"   more:     {about.page}")
    return "\n".join(lines) + "\n"
