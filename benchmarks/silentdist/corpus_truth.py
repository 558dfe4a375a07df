"""What is wrong with each script of the corpus, written before its author had seen how verify and doctor judge.

`corpus/ported` holds scripts that were written with Paceline, `corpus/plain` torchrun scripts. A script whose name
starts with ok_ has no fault. Every other script has a single fault. The lines that bear it end in `# fault`: whoever is
shown one of these lines is shown the right place.

One script was written as faulty and is not, as truth/witness_ported.py showed: ok_weighted_sampler_rank_seed, whose
generator is seeded with the rank. Paceline's loader gives a sampler the same draws on every rank.

Another was written as healthy and is not, as verify and then truth/trainer_scale.py showed: trainer_scales_classifier.
Its fault is in transformers 5.23.0. ok_trainer avoids it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "corpus"
MARK = "# fault"


@dataclass(frozen=True)
class Fault:
    """One faulty script.

    Attributes:
        kind: a word or two for what goes wrong, in the author's own terms.
        wrong: the same as a sentence.
        causes: the tool's names that lead to the right line of thought; added when the names were read in the docs,
            before the first measurement; those of names that the tools got later, before the next. None: none fits.
    """

    kind: str
    wrong: str
    causes: tuple[str, ...]


# Written with Paceline: the model depends on the number of processes.
PORTED: dict[str, Fault] = {
    "accumulation_divided_by_hand": Fault(
        "loss scaled by world size",
        "The loss is divided by a number of accumulation steps that depends on the number of processes.",
        ("scaled-by-processes",),
    ),
    "activation_hook_on_main": Fault(
        "rank-dependent forward", "A forward hook clamps activations on rank 0 alone.", ("control-by-rank",)
    ),
    "barlow_twins_local": Fault(
        "batch statistics of the shard",
        "Means, deviations and correlations are those of the shard.",
        ("in-batch-loss",),
    ),
    "class_weights_of_batch": Fault(
        "batch statistics of the shard", "Class weights come from the labels of the shard.", ("in-batch-loss",)
    ),
    "cnn_loss_times_world": Fault(
        "loss scaled by world size", "The loss is multiplied by the number of processes.", ("scaled-by-processes",)
    ),
    "dataset_counts_calls": Fault(
        "state in Python objects",
        "The data set counts its fetches, and each process fetches its own share.",
        ("other-random-numbers", "state-outside"),
    ),
    "detr_num_boxes": Fault(
        "mean of means",
        "The box loss is divided by the number of boxes of the shard.",
        ("mean-of-means", "depends-on-shard-size"),
    ),
    "dino_center_local": Fault(
        "buffer from the shard", "The teacher's centre is a mean over the shard.", ("buffer-not-synchronised",)
    ),
    "dropout_by_rank": Fault(
        "rank-dependent setting",
        "The dropout probability grows with the rank.",
        ("control-by-rank", "other-random-numbers"),
    ),
    "ema_on_main_fed_back": Fault(
        "state on one rank", "Rank 0 alone keeps the average that all ranks load.", ("changed-outside",)
    ),
    "fit_callback_lr_on_loss": Fault(
        "decision by the local loss",
        "A callback lowers the learning rate by the loss of the shard.",
        ("control-by-rank",),
    ),
    "gan_noise_own_generator": Fault(
        "own random generator",
        "A generator with a fixed seed gives both shards the same noise.",
        ("other-random-numbers", "state-outside"),
    ),
    "gradient_hook_world": Fault(
        "gradient scaled by world size",
        "A tensor hook multiplies one gradient by the number of processes.",
        ("scaled-by-processes", "clipped-early"),
    ),
    "gradient_noise": Fault(
        "gradient changed by rank", "Each rank adds other noise to .grad before the step.", ("control-by-rank",)
    ),
    "graph_node_mean": Fault(
        "mean of means", "The loss is a mean over nodes, of which each shard has another number.", ("mean-of-means",)
    ),
    "hf_gpt2_padded_labels": Fault(
        "mean of means", "The model's own loss is a mean over the tokens of the shard.", ("mean-of-means",)
    ),
    "loss_weight_by_rank": Fault(
        "rank-dependent loss", "Even ranks alone compute the second loss.", ("control-by-rank",)
    ),
    "masked_lm_padding": Fault(
        "mean of means", "The loss is a mean over the tokens of the shard that are not padding.", ("mean-of-means",)
    ),
    "mixup_flip": Fault(
        "examples of the shard mixed", "Each example is mixed with its mirror image in the shard.", ("in-batch-loss",)
    ),
    "moco_queue_local": Fault(
        "state in Python objects",
        "The queue of negatives holds the keys of the process alone.",
        ("in-batch-loss", "buffer-not-synchronised", "control-by-rank", "state-outside"),
    ),
    "multitask_running_weights": Fault(
        "state in Python objects",
        "The weights of the losses follow running means of the local losses.",
        ("control-by-rank", "state-outside"),
    ),
    "noise_level_by_rank": Fault(
        "rank-dependent data",
        "The data set adds more noise on higher ranks.",
        ("other-random-numbers", "control-by-rank"),
    ),
    "ohem_in_shard": Fault(
        "selection within the shard", "The hardest quarter is chosen in each shard.", ("in-batch-loss",)
    ),
    "padding_row_on_main": Fault(
        "weights written on one rank", "Rank 0 alone sets a row of the embedding to zero.", ("changed-outside",)
    ),
    "plateau_on_local_loss": Fault(
        "decision by the local loss",
        "The plateau scheduler sees the validation loss of the process.",
        ("control-by-rank",),
    ),
    "pretrained_on_main_after_prepare": Fault(
        "weights written on one rank",
        "Rank 0 alone loads pretrained weights after prepare.",
        ("changed-outside", "initialisation-by-rank"),  # the second one was added when it had been said: it is right
    ),
    "reinforce_local_advantage": Fault(
        "batch statistics of the shard",
        "Advantages are normalised by mean and deviation of the shard.",
        ("in-batch-loss",),
    ),
    "rnn_hidden_of_last_row": Fault(
        "state across batches",
        "The state that starts a batch is that of the shard's last row.",
        ("in-batch-loss", "control-by-rank", "state-outside"),
    ),
    "schedule_per_yield": Fault(
        "schedule per yield",
        "The schedule moves with each micro-batch, and their number depends on the processes.",
        ("scheduler-steps",),
    ),
    "simclr_in_shard": Fault(
        "examples of the shard compared",
        "The contrastive loss knows the negatives of the shard alone.",
        ("in-batch-loss",),
    ),
    "standardize_in_forward": Fault(
        "batch statistics of the shard",
        "The forward standardizes by mean and deviation of the shard.",
        ("in-batch-loss",),
    ),
    "stochastic_depth_own_rng": Fault(
        "own random generator",
        "Blocks are left out as a generator of the rank says.",
        ("control-by-rank", "other-random-numbers"),
    ),
    "stream_sharded_twice": Fault(
        "data cut by rank",
        "The stream gives each rank a part, of which Paceline gives it a part again.",
        ("examples-overlap-or-miss",),
    ),
    "subset_by_rank": Fault(
        "data cut by rank", "The data set is cut by rank before the loader cuts it.", ("examples-overlap-or-miss",)
    ),
    "sum_over_global_batch": Fault(
        "loss scaled by world size",
        "The sum over the shard is divided by the global batch, and taken for a mean.",
        ("sum-for-mean", "mean-for-sum"),
    ),
    "tabular_lr_by_world": Fault(
        "setting by world size",
        "The learning rate is multiplied by the number of processes.",
        ("learning-rate-scaled",),
    ),
    "time_seed": Fault("not deterministic", "The clock seeds the initial weights.", ("not-deterministic",)),
    "vae_kl_annealing_local_count": Fault(
        "state in Python objects",
        "The KL weight grows with the number of examples that this process saw.",
        ("control-by-rank", "state-outside"),
    ),
    "vqgan_adaptive_weight": Fault(
        "weight from local gradients",
        "The weight of the adversarial loss comes from gradient norms of the shard.",
        ("in-batch-loss",),
    ),
    "vqvae_ema_codebook": Fault(
        "buffer from the shard", "The codebook follows the members of the shard.", ("buffer-not-synchronised",)
    ),
    "weight_decay_by_world": Fault(
        "setting by world size",
        "The weight decay is divided by the number of processes.",
        ("control-by-rank", "optimizer-settings"),
    ),
}

# Written for torchrun, without Paceline.
PLAIN: dict[str, Fault] = {
    "accelerate_gather_counts_padding": Fault(
        "padded evaluation", "gather keeps the examples that fill up the last batch.", ("padded_evaluation",)
    ),
    "accelerate_loader_not_prepared": Fault(
        "same data", "The loader is not prepared: all ranks see the same batches.", ("same_examples",)
    ),
    "accelerate_loss_backward": Fault(
        "loss not divided", "loss.backward() leaves out the division by the accumulation steps.", ("accumulation",)
    ),
    "accumulation_not_divided": Fault(
        "loss not divided", "Four micro-batches are added and not divided.", ("accumulation",)
    ),
    "all_ranks_save_one_file": Fault(
        "file written by all ranks", "All ranks write one checkpoint file at once.", ("same_checkpoint",)
    ),
    "all_reduce_on_main_hang": Fault("collective on one rank", "Rank 0 alone calls all_reduce.", ("collectives",)),
    "allreduce_sum_not_divided": Fault(
        "gradient not divided", "Gradients are summed over ranks and not divided.", ("summed_gradients",)
    ),
    "async_reduce_never_waited": Fault(
        "asynchronous result used",
        "The step uses gradients whose reduction nobody waited for.",
        ("weights_differ", "partly_reduced", "not_reduced", "gradients_differ"),
    ),
    "buffers_not_broadcast": Fault(
        "buffers differ",
        "Batch norm's statistics differ over ranks, and each evaluates with its own.",
        ("weights_differ", "buffers_differ"),
    ),
    "clip_before_allreduce": Fault(
        "clipped before reduction", "Each rank clips its own gradient before the average.", ("clip_before_reduce",)
    ),
    "clip_before_unscale": Fault(
        "clipped before unscaling",
        "Gradients are clipped while the scaler's factor is in them.",
        ("clip_before_unscale",),
    ),
    "clip_loss_gather_no_grad": Fault(
        "gather without gradient", "all_gather cuts the graph, so that the towers get no gradient.", ("no_gradient",)
    ),
    "contrastive_in_shard": Fault(
        "examples of the shard compared", "The contrastive loss knows the examples of the rank alone.", ()
    ),
    "criterion_parameters_unsynced": Fault(
        "parameters outside DDP",
        "The criterion's parameters are optimized and never synchronized.",
        ("weights_differ", "unknown_to_ddp"),
    ),
    "ddp_no_sampler": Fault("same data", "No sampler, one seed: all ranks see the same batches.", ("same_examples",)),
    "ddp_no_set_epoch": Fault("set_epoch forgotten", "Every epoch has the same order.", ("no_set_epoch",)),
    "eval_mode_left_on_main": Fault(
        "mode differs by rank", "Rank 0 stays in evaluation mode, without dropout.", ("modes_differ",)
    ),
    "fabric_loader_not_set_up": Fault(
        "same data", "The loader is not set up: all ranks see the same batches.", ("same_examples",)
    ),
    "forgot_ddp": Fault(
        "never synchronized", "The model is not wrapped: each rank trains its own.", ("weights_differ", "not_reduced")
    ),
    "fsdp2_local_clip": Fault(
        "clipped by a local norm", "Each rank clips by the norm of its own shards.", ("clip_of_shards",)
    ),
    "fsdp2_optimizer_before_shard": Fault(
        "optimizer of other parameters",
        "The optimizer holds the parameters from before sharding: nothing is trained.",
        ("no_gradient",),
    ),
    "head_replaced_after_wrap": Fault(
        "parameters outside DDP",
        "The new head was made after wrapping, and is never synchronized.",
        ("weights_differ", "weights_differ_at_start", "unknown_to_ddp"),
    ),
    "init_after_wrap": Fault(
        "weights differ from the start",
        "Weights are drawn anew after wrapping, with a seed for each rank.",
        ("weights_differ_at_start", "written_outside"),
    ),
    "iterable_same_stream": Fault("same data", "The stream is not divided over ranks.", ("same_examples",)),
    "iterable_workers_repeat": Fault(
        "data repeated",
        "The stream is not divided over the workers of a rank: each example comes twice an epoch.",
        ("same_in_workers",),
    ),
    "local_metric_printed": Fault(
        "local metric", "The accuracy that decides on the best model is that of rank 0's part.", ("local_metric",)
    ),
    "local_sgd_average_lost": Fault(
        "never synchronized",
        "The averages go into a copy of the weights, and are lost.",
        ("weights_differ", "not_reduced"),
    ),
    "lr_by_rank": Fault(
        "setting by rank", "The learning rate depends on the rank.", ("lr_differs", "optimizer_differs")
    ),
    "metrics_from_set_order": Fault(
        "collectives in another order",
        "Ranks reduce the metrics in different orders, so that they mix.",
        ("collectives",),
    ),
    "module_bypass": Fault(
        "never synchronized", "Training calls model.module, so that DDP does nothing.", ("weights_differ", "past_ddp")
    ),
    "nanogpt_no_seed_offset": Fault("same data", "All ranks draw the same random batches.", ("same_examples",)),
    "no_sync_always": Fault(
        "never synchronized where it matters",
        "no_sync covers the last micro-batch, not the first ones.",
        ("weights_differ", "sync_off"),
    ),
    "padded_eval_summed": Fault(
        "padded evaluation", "The padded sampler counts an example of the test set twice.", ("padded_evaluation",)
    ),
    "plateau_local_loss": Fault(
        "setting by rank", "The plateau scheduler sees a local loss, and the learning rates part.", ("lr_differs",)
    ),
    "resume_on_main_only": Fault(
        "weights differ from the start",
        "Rank 0 alone loads the checkpoint, after wrapping.",
        ("weights_differ_at_start", "written_outside"),
    ),
    "resume_without_optimizer": Fault("resume", "The saved optimizer state is not restored.", ()),
    "sampler_seed_by_rank": Fault(
        "data overlap", "Ranks cut different shuffles: examples are repeated and left out.", ("same_examples",)
    ),
    "scheduler_on_main_only": Fault(
        "setting by rank", "The schedule moves on rank 0 alone.", ("lr_differs", "scheduler_steps")
    ),
    "shard_stride_hardcoded": Fault(
        "data missed", "The data are cut for four ranks, and half of them is never seen.", ("examples_missed",)
    ),
    "split_differs_by_rank": Fault(
        "data overlap",
        "The split is drawn anew on each rank: ranks train on what others validate with.",
        ("same_examples",),
    ),
    "step_on_main_only": Fault(
        "step on one rank", "Rank 0 alone updates its weights.", ("weights_differ", "steps_differ")
    ),
    "token_mean_of_means": Fault(
        "mean of means", "Each rank divides by the number of its own tokens.", ("loss_mean_of_means",)
    ),
    "trainer_own_dataloader": Fault(
        "same data", "The trainer's own loader is not divided over ranks.", ("same_examples",)
    ),
    "uneven_batches_hang": Fault("uneven batches", "One rank has a batch more and waits for ever.", ("collectives",)),
    "unfrozen_after_wrap": Fault(
        "parameters outside DDP",
        "What was frozen when DDP was made is never synchronized.",
        ("weights_differ", "unknown_to_ddp"),
    ),
    "worker_init_same_numbers": Fault(
        "random numbers repeated",
        "Workers of all ranks draw the same augmentation in every epoch.",
        ("same_random_numbers",),
    ),
    "zero_without_ddp": Fault(
        "never synchronized", "Nothing averages the gradients under ZeroRedundancyOptimizer.", ("not_reduced",)
    ),
}

# A second set, by another author, who had not seen the code of the tools; written with Paceline.
PORTED_SECOND: dict[str, Fault] = {
    "ctc_per_symbol": Fault(
        "mean of means",
        "The sum of the CTC losses is divided by the number of symbols of the shard.",
        ("mean-of-means", "depends-on-shard-size"),
    ),
    "dqn_target_sync": Fault(
        "state in Python objects",
        "The frames that decide when the target network follows are those of this process.",
        ("state-outside",),
    ),
    "dragan_penalty": Fault(
        "batch statistics of the shard", "The spread around the data is the deviation of the shard.", ("in-batch-loss",)
    ),
    "handwriting_lstm": Fault(
        "gradient bounded within the shard",
        "A hook bounds the activations' gradient by its norm over the shard.",
        ("clipped-early", "in-batch-loss"),
    ),
    "hf_linear_schedule": Fault(
        "schedule by world size", "The schedule's length is divided by the number of processes.", ("scheduler-steps",)
    ),
    "mae_lr_by_images": Fault(
        "schedule by the size of the shard",
        "The iterations of an epoch are counted with the number of examples of the shard.",
        ("scheduler-steps", "depends-on-shard-size"),
    ),
    "moe_load_balance": Fault(
        "batch statistics of the shard",
        "The balance of the experts is a product of means over the shard.",
        ("in-batch-loss",),
    ),
    "nanogpt_random_pieces": Fault(
        "own random generator",
        "A NumPy generator seeded with the rank draws the pieces of text.",
        ("other-random-numbers", "control-by-rank"),
    ),
    "qat_minmax_observer": Fault(
        "buffer from the shard",
        "The ranges of the fake quantisation follow the extremes of the shard.",
        ("buffer-not-synchronised", "in-batch-loss"),
    ),
    "ranknet_pairs": Fault(
        "mean of means",
        "The loss is a mean over the pairs of the shard, and queries differ in their number of pairs.",
        ("mean-of-means",),
    ),
    "rlhf_adaptive_kl": Fault(
        "state in Python objects",
        "The coefficient of the KL penalty follows the divergence in the shard.",
        ("state-outside",),
    ),
    "sam_two_passes": Fault(
        "gradient of the shard",
        "The weights go up by the gradient of the shard, so that each process goes to another neighbour.",
        ("in-batch-loss",),
    ),
    "segmentation_void_fit": Fault(
        "mean of means", "The loss is a mean over the pixels of the shard that are not void.", ("mean-of-means",)
    ),
    "speech_mean_pooling": Fault(
        "padding of the shard",
        "The mean over time takes in the padding, which goes to the longest recording of the shard.",
        ("in-batch-loss",),
    ),
    "two_tower_logq": Fault(
        "examples of the shard compared", "The softmax is over the items of the shard alone.", ("in-batch-loss",)
    ),
    "vdm_stratified_times": Fault(
        "drawn for the shard",
        "The times are spread evenly over the shard, by a row's place in it and its size.",
        ("depends-on-shard-size",),
    ),
}

# The second set for torchrun, without Paceline.
PLAIN_SECOND: dict[str, Fault] = {
    "accelerate_clip_in_accumulate": Fault(
        "clipped before reduction",
        "Gradients are clipped after each micro-batch, while they are partial and each rank's own.",
        ("clip_before_reduce",),
    ),
    "accelerate_schedule_length": Fault(
        "schedule too short",
        "The prepared schedule makes a step for each process at once, and ends after half of the training.",
        ("schedule_length", "scheduler_steps"),
    ),
    "batch_sampler_epoch": Fault(
        "set_epoch forgotten",
        "set_epoch never reaches the sampler, which is inside the batch sampler.",
        ("no_set_epoch",),
    ),
    "early_stop_own_loss": Fault(
        "ranks leave the loop apart",
        "Each rank stops by the loss of its own part, and the other one waits for it.",
        ("collectives", "steps_differ"),
    ),
    "ema_swapped_in": Fault(
        "weights written on one rank",
        "Rank 0 takes the averaged weights for its test and trains on with them.",
        ("written_outside", "weights_differ"),
    ),
    "f1_of_ranks": Fault(
        "metric averaged over ranks",
        "The F1 score that decides on the best epoch is a mean of the ranks' own F1 scores.",
        ("mean_of_means", "local_metric"),
    ),
    "fixmatch_two_loaders": Fault(
        "same data", "The loader of unlabelled examples is not divided over ranks.", ("same_examples",)
    ),
    "fsdp2_pretrained": Fault(
        "weights differ from the start",
        "Rank 0 alone loads pretrained weights before sharding, so that the others' shards are random.",
        ("weights_differ_at_start",),
    ),
    "gan_one_ddp": Fault(
        "never synchronized",
        "The generator is not wrapped, and each rank trains its own.",
        ("not_reduced", "unknown_to_ddp", "partly_reduced", "weights_differ"),
    ),
    "lightning_plateau": Fault(
        "setting by rank",
        "The plateau scheduler sees the validation loss of the rank, and the learning rates part.",
        ("lr_differs", "local_metric"),
    ),
    "moco_enqueue": Fault(
        "buffer from the shard",
        "The queue takes the keys of one rank alone, and DDP writes rank 0's over the others'.",
        ("buffers_differ",),
    ),
    "ppo_multigpu_actor": Fault(
        "partly synchronized",
        "The critic's gradients are left out of the average.",
        ("partly_reduced", "not_reduced", "weights_differ"),
    ),
    "reload_best_at_decay": Fault(
        "weights differ by a race",
        "Ranks read the best checkpoint while rank 0 has yet to write it.",
        ("written_outside", "weights_differ"),
    ),
    "sampler_node_rank": Fault(
        "same data",
        "The sampler is given the rank of the node, so that all ranks of a node see the same part.",
        ("same_examples", "examples_missed"),
    ),
    "task_heads_reduced": Fault(
        "collectives in another order",
        "Ranks leave out different parameters, so that the gradients of the two heads are mixed.",
        ("collectives", "gradients_differ", "partly_reduced"),
    ),
    "trainer_focal_loss": Fault(
        "loss not divided",
        "The trainer leaves the division by the accumulation steps to the loss, which does not do it.",
        ("accumulation",),
    ),
    "trainer_scales_classifier": Fault(
        "loss scaled by world size",
        "The trainer multiplies the loss by the number of processes, since it expects a sum over all tokens.",
        ("factor", "accumulation"),
    ),
    "webdataset_urls": Fault(
        "data overlap",
        "Each rank shuffles the shards in its own way before it takes its part.",
        ("same_examples", "examples_missed"),
    ),
    "zero_grad_per_micro": Fault(
        "gradients lost",
        "Gradients are set to zero before each micro-batch, so that the last one alone counts.",
        ("gradients_dropped",),
    ),
}

# Healthy scripts of the second set: whoever wrote this set had read neither the tools nor what they said of the first
# one, and the authors of the tools had not seen it when it was first measured.
OK_SECOND = {
    "ported": {
        "ok_ctc_stream",
        "ok_maml_sinusoids",
        "ok_moe_balance_gathered",
        "ok_nerf_rays",
        "ok_ppo_global_kl",
        "ok_qat_observer_gathered",
        "ok_r1_lazy_penalty",
        "ok_swa_averaged",
    },
    "plain": {
        "ok_a2c_bucket",
        "ok_accelerate_schedule",
        "ok_fsdp2_accumulation",
        "ok_lightning_trainer",
        "ok_moco_gathered",
        "ok_resume_everything",
        "ok_shards_shuffled_alike",
        "ok_task_heads_unused",
    },
}
TRUTHS = {"ported": PORTED | PORTED_SECOND, "plain": PLAIN | PLAIN_SECOND}
SECOND = {"ported": PORTED_SECOND.keys() | OK_SECOND["ported"], "plain": PLAIN_SECOND.keys() | OK_SECOND["plain"]}

# What `make conformance PART=ci` runs: each kind of fault once or twice, and healthy scripts that look suspicious. They
# are quick, need no library, and were judged right when all were measured.
CORE = {
    "ported": [
        "accumulation_divided_by_hand",
        "barlow_twins_local",
        "detr_num_boxes",
        "dino_center_local",
        "ema_on_main_fed_back",
        "handwriting_lstm",
        "loss_weight_by_rank",
        "mae_lr_by_images",
        "masked_lm_padding",
        "moco_queue_local",
        "pretrained_on_main_after_prepare",
        "stream_sharded_twice",
        "sum_over_global_batch",
        "time_seed",
        "weight_decay_by_world",
        "ok_advantage_global",
        "ok_ctc_stream",
        "ok_weighted_sampler_rank_seed",
    ],
    "plain": [
        "accumulation_not_divided",
        "allreduce_sum_not_divided",
        "buffers_not_broadcast",
        "clip_before_allreduce",
        "clip_before_unscale",
        "ddp_no_sampler",
        "ddp_no_set_epoch",
        "eval_mode_left_on_main",
        "fsdp2_optimizer_before_shard",
        "iterable_workers_repeat",
        "local_metric_printed",
        "module_bypass",
        "no_sync_always",
        "padded_eval_summed",
        "ppo_multigpu_actor",
        "resume_on_main_only",
        "scheduler_on_main_only",
        "token_mean_of_means",
        "unfrozen_after_wrap",
        "zero_grad_per_micro",
        "ok_fsdp2_accumulation",
        "ok_local_sgd",
    ],
}


def scripts(part: str) -> list[Path]:
    """All scripts of a part ("ported" or "plain"), faulty and healthy."""
    return sorted((HERE / part).glob("*.py"))


def fault_of(script: Path) -> Fault | None:
    """What is wrong with a script; None where nothing is."""
    return TRUTHS[script.parent.name].get(script.stem)


def fault_lines(script: Path) -> set[int]:
    """The numbers of the lines that are marked, from 1."""
    return {number for number, line in enumerate(script.read_text().splitlines(), 1) if line.rstrip().endswith(MARK)}
