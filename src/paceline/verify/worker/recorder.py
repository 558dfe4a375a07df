"""Save the results of each step of a run, and make each step start from a given state.

A step is one global batch, from the first yield of a training loader to the last update that uses this batch.

1. A step begins. The subject run writes its whole state. Every other run loads that state, and so repeats the same
   step. Runs of whole batches, and runs that report rank 0 of 1 to the script, keep their optimizer options, such as
   the learning rate.
2. Before each update the recorder saves the gradients. A run of one process then loads the gradients of the subject
   run. So the update is compared independently of the gradient.
3. After each update the recorder saves weights and buffers.

If an optimizer gets a closure, the recorder saves the gradients of the closure's first evaluation. Without a prepared
optimizer, it saves gradients after each backward of a last micro-batch, and the step ends when the script has cleared
the gradients.

Independent replicas have no common state between two steps. A run loads only their first state, and saves only their
last.

Each rank writes `rank-N.json`. Tensors are in safetensors files. K is the number of a step, U of an update, N of a
rank, M of a yield:

state-K       the whole state of the subject run before the step
start-K       the models of that state
own-K         tensors that were changed since the last update, before the run loaded state-K
grad-K-U-rN   gradients before the update
take-K-U-rN   the same gradients as whole tensors, from the subject run
after-K-U     weights and buffers after the update
part-K-M      gradients so far when the yield begins, if one process computes all shards in sequence
initial       weights and buffers before the run loaded its first state
end           weights and buffers after the last step

`state` and `take` contain whole tensors, because other runs load them. All other files are only compared. They contain
sketches of large tensors (observe/sketches.py).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.comm import dtensor
from paceline.comm.mesh import replicas_here, world_group
from paceline.data.loader import Loader
from paceline.errors import ModelError, UsageError
from paceline.monitor.window import LOSS, Window
from paceline.observe.digests import digest
from paceline.observe.patching import Patches
from paceline.observe.script_stack import Place
from paceline.observe.sketches import sketched
from paceline.run import Run, RunParts
from paceline.step.loss import terms_of
from paceline.step.observer import StepObserver
from paceline.torch_private.core import BatchNormBase, backward_hooks
from paceline.trials.spec import TrialEnded, TrialSpec
from paceline.verify.worker.backward_watch import BackwardWatch, leaves_outside, watch_hooks, zeroed
from paceline.verify.worker.call_site import call_site
from paceline.verify.worker.collate_recorder import CollateRecorder
from paceline.verify.worker.perturbation import dropout_off, nudge_weights, recurrent_dropout_off
from paceline.verify.worker.rank_queries import RankQueries
from paceline.verify.worker.record_files import (
    has_disk_space,
    keep_own_options,
    load_gradients,
    load_state,
    named_tensors,
    new_step_record,
    optimizer_digests,
    optimizer_options,
    rank_record,
    save_state,
    save_tensors,
)
from paceline.verify.worker.rng_draws import RandomDraws
from paceline.verify.worker.script_tracer import BACKWARD_HOOKS, ScriptTracer

DIFFERENT_TENSORS = "do not hold the same tensors"  # words of the error if a tensor is missing on some ranks


class Recorder(StepObserver):
    """Records a run from its start to its end."""

    def __init__(self, run: Run, parts: RunParts, spec: TrialSpec) -> None:
        assert spec.reference is not None
        self._run, self._parts, self._spec, self._reference_folder = run, parts, spec, spec.reference
        self._world = run.world  # the real world, whatever the script sees
        self._steps: list[dict[str, Any]] = []  # the records of complete steps
        self._current: dict[str, Any] | None = None  # the record of the current step
        self._window = Window(run.device)  # the losses of the current step
        self._watch = BackwardWatch(run, parts.noise, lambda: self._current)
        self._changing_hooks: set[str] = set()  # the names of parameters with a hook that changes gradients
        self._collate_recorders: dict[Loader, CollateRecorder] = {}
        self._installed: CollateRecorder | None = None  # the recorder of the loader that is being made
        self._loop_form = True  # whether the current backward call comes from a loop, not a closure
        self._disk_full = False  # the disk has no space for another step
        self._hooks_gradients = False  # whether the script has registered a hook on a gradient
        self._outside_leaves: list[Tensor] = []  # trained tensors that are in no model
        self._buffers_at_start: list[tuple[Tensor, Tensor]] = []  # (buffer, its value when the step began)
        self._used_batch_norm = False  # whether a batch norm was in training mode
        self._written = False  # whether the record has been written
        self._evaluations = 0  # evaluations of the closure in this run.step
        self._manual_updates = 0  # updates that the script made without an optimizer
        self._path = os.path.join(spec.directory, f"rank-{run.world.rank}.json")
        if os.path.exists(self._path):  # the script made an earlier run, which is already recorded
            raise TrialEnded(0)
        plan = parts.strategy.plan
        if spec.rotated_shards:
            parts.strategy.plan = plan = plan.shifted()
        # Whether each rank holds a complete model; whether trained tensors outside the models are recorded.
        self._replicated = not parts.splits_closure
        self._notes_leaves = not parts.runs_closure
        self._layer_names: dict[nn.Module, str] = {}  # the layers with recorded calls
        self._call_hook: Any = None  # the handle of the hook that records these calls
        parts.stepper.losses = []
        self._patches = Patches()
        # With noise="example" every run draws the same numbers, and dropout may stay on.
        self._dropout_off = spec.dropout_off and parts.noise is None
        if self._dropout_off:
            dropout_off(self._patches)
        self._tracer: ScriptTracer | None = None
        if spec.trace_from is not None:
            path = os.path.join(spec.directory, f"lines-{run.world.rank}.json")
            self._tracer = ScriptTracer(parts, path, spec.trace_from, self._patches)
        if spec.rank_0_of_1 or spec.trace_from is not None:
            RankQueries(run, spec.rank_0_of_1, self._note_rank_query, self._patches)
        if spec.perturbed:
            for owner, name in BACKWARD_HOOKS:
                self._patches.replace(owner, name, self._watch_hook_registration(getattr(owner, name)))

    def _note_rank_query(self, at: Place) -> None:
        if self._tracer is not None:
            self._tracer.record_rank_query(at)

    # --- events of the run

    def before_prepare(self, objects: tuple[Any, ...]) -> None:
        if self._tracer is not None:  # before prepare moves tensors: earlier writes went to these addresses
            models = [thing for thing in objects if isinstance(thing, nn.Module)]
            self._tracer.register_models(models, len(self._parts.models))

    def after_prepare(self) -> None:
        for number, model in enumerate(self._parts.models):
            if self._dropout_off:
                recurrent_dropout_off(model)
            compiled = bool(self._run.settings.compile)  # hooks would break compiled graphs
            self._used_batch_norm |= compiled and any(isinstance(module, BatchNormBase) for module in model.modules())
            for name, module in model.named_modules() if self._replicated and not compiled else ():
                if not list(module.children()):
                    self._layer_names.setdefault(module, f"{number}/{name}" if number else name)
        if self._layer_names and self._call_hook is None:
            self._call_hook = register_module_forward_pre_hook(self._note_layer_call)
        if self._tracer is not None:
            self._tracer.accept_options()

    def _watch_hook_registration(self, original: Any) -> Any:
        """Make a replacement for a function that registers a hook on gradients. It notes hooks of the script, but not
        hooks of Paceline."""

        def register_hook(own: Any, *args: Any, **options: Any) -> Any:
            at, inside = call_site(from_recorder=True)
            self._hooks_gradients |= at is not None and not inside
            return original(own, *args, **options)

        return register_hook

    def _may_scale_loss(self) -> bool:
        """Whether the loss may be scaled in the backward. False if something would see the scale: a hook of the script
        (it may clip a gradient by its norm), or a trained tensor outside the models."""
        hooked = self._hooks_gradients or any(backward_hooks(parameter) for parameter in self._parts.names)
        seen = bool(self._outside_leaves) or hooked
        if self._current is not None:
            self._current["scaled"] = not seen
        return not seen

    def _note_layer_call(self, module: nn.Module, *_: Any) -> None:
        """Record the call of a layer. This hook runs before the forward of every module. It is registered globally, not
        on a model, because a script may save, pickle or copy the model."""
        name = self._layer_names.get(module)
        if name is None:
            return
        if self._current is not None and name not in self._current["modules"]:
            self._current["modules"].append(name)
        self._used_batch_norm |= isinstance(module, BatchNormBase) and module.training

    def before_loader(self, dataset: Any, options: dict[str, Any]) -> None:
        if not options["train"]:
            return
        if self._spec.whole_batches:
            options["micro_batch"] = None
        if self._tracer is not None:
            self._tracer.record_loader(dataset, options)
        self._installed = CollateRecorder.install(options)

    def after_loader(self, loader: Loader) -> None:
        if self._installed is None:
            return
        self._collate_recorders[loader], self._installed = self._installed, None
        loader.streams.backwards = self._spec.reversed_batches
        loader.probing = False  # if data differ between ranks, this is a finding and must not end the run

    def before_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        turns = self._parts.in_sequence
        if loader.train and request.micro == 0:
            self._detect_manual_update()
        if loader.train and request.micro == 0 and (self._current is None or self._current["updates"]):
            self._begin_step(request.epoch, request.step)
        elif loader.train and turns and request.micro:
            if self._world.size == 1:
                self._write(f"part-{len(self._steps)}-{request.micro}", self._gradients())
            for buffer, value in self._buffers_at_start if request.micro * turns % request.micros == 0 else ():
                buffer.copy_(value)  # with several processes, each would start with these values
        self._watch.asked_all_ranks = False

    def after_yield(self, loader: Loader) -> None:
        request, current = loader.current, self._current
        if not loader.train or current is None:
            return
        assert request is not None
        current["yields"] += 1
        if self._tracer is not None:
            self._tracer.begin_yield(request.examples)
        parts, drew = self._collate_recorders[loader].collect(request, self._spec.reversed_batches)
        current["drew"] |= drew
        for part, digests in parts:
            if part.indices:
                current["ids"].append([loader.name, part.shard, part.micro, list(part.indices)])
                current["data"].append([loader.name, part.shard, part.micro, digests])
        keys = [loader.streams.torch_key(request, part.shard, part.micro) for part in request.parts]
        # If the strategy runs the closure, it seeds the generators for each micro-batch of the yield.
        self._watch.draws.remember(*(keys if self._parts.runs_closure else []))

    def before_end(self, loader: Loader, whole: bool) -> None:
        if loader.train and whole:
            self._detect_manual_update()

    def _detect_manual_update(self) -> None:
        """Detect whether the script updated the weights itself and cleared the gradients since its last backward."""
        current, ownership = self._current, self._parts.stepper.ownership
        found = 0 if self._parts.optimizers else ownership.count_manual_updates()
        if current is not None and found > self._manual_updates:
            self._record_update(current)
        self._manual_updates = found

    def closure(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        if self._parts.splits_closure:  # the closure does not run as a whole
            return loss_fn

        def seen(model: Any, batch: Any) -> Any:
            draws = RandomDraws(self._run.device, self._parts.noise)  # for this replica, which may run in a thread
            draws.remember()
            loss = loss_fn(model, batch)
            self._watch.note_draws(draws)
            if self._notes_leaves:
                self._note_outside_leaves([term.value for term in terms_of(loss)])
            if self._tracer is not None:
                self._tracer.begin_backward([term.value for term in terms_of(loss)])
            mine = self._parts.strategy.plan.mine
            shard = replicas_here().rank if len(mine) > 1 else mine[0]
            return zeroed(loss) if self._is_zeroed(shard) else loss

        return seen

    def before_backward(self, losses: tuple[Tensor, ...]) -> float:
        self._loop_form = bool(losses)
        if self._loop_form and self._notes_leaves:
            self._note_outside_leaves(losses)
        self._watch.before_backward(self._gradients)
        if self._loop_form and self._tracer is not None:
            self._tracer.begin_backward(list(losses))
        return 0 if self._loop_form and self._is_zeroed(*self._parts.strategy.plan.mine) else 1

    def scale(self) -> float:
        """A perturbed run computes the backward of 0.75 x the loss, which changes where numbers are rounded."""
        return 0.75 if self._spec.perturbed and self._may_scale_loss() else 1

    def after_backward(self) -> None:
        if self._tracer is not None:
            self._tracer.end_backward()
        if self._loop_form or self._parts.splits_closure:
            self._watch.note_draws()
        self._watch.after_backward(self._gradients if self._notes_leaves else dict)
        self._keep_gradients_without_optimizer()

    def on_request(self) -> None:
        self._watch.asked_all_ranks = True

    def _keep_gradients_without_optimizer(self) -> None:
        """Without an optimizer it is unknown when the script uses the gradients, so save them after each backward."""
        current, latest = self._current, self._run.latest
        if current is None or self._parts.optimizers or self._parts.independent:
            return
        if latest is not None and latest.current is not None and latest.current.final:
            self._keep_gradients(current)
            current["own"] = True

    def _is_zeroed(self, *shards: int) -> bool:
        """Whether the loss of these shards is multiplied by zero in this update."""
        spec, current = self._spec, self._current
        return spec.only_shard not in (None, *shards) and current is not None and current["updates"] == spec.only_update

    def _note_outside_leaves(self, roots: Sequence[Tensor]) -> None:
        """Record trained tensors that are in no model: leaves with gradients that persist between steps. (An input is a
        different tensor in each step.)"""
        names = self._parts.names
        if self._current is None or dtensor.any_sharded(names):
            return
        found = leaves_outside(roots, names)
        stay = [leaf for leaf in found if any(leaf is other for other in self._outside_leaves)]
        self._current["unowned_tensors"] |= {f"{i}, of shape {tuple(x.shape)}": digest(x) for i, x in enumerate(stay)}
        self._outside_leaves = found

    def after_step(self, acted: bool) -> None:
        self._evaluations = 0
        if acted and self._current is not None:
            self._record_update(self._current)

    def _record_update(self, current: dict[str, Any]) -> None:
        """Record an update: the losses before it, and the weights and buffers after it."""
        self._collect_losses(current)
        if not self._parts.independent:
            state = self._state()
            if self._world.rank == 0 and state is not None:
                self._write(f"after-{len(self._steps)}-{current['updates']}", named_tensors(state["models"]))
        current["updates"] += 1
        current["after"] = self._digests()
        if self._tracer is not None:
            self._tracer.accept_options()  # a prepared scheduler has stepped
        self._watch.asked_all_ranks = False
        self._watch.draws.remember()  # the update has seeded the generators again

    def _collect_losses(self, current: dict[str, Any]) -> None:
        """Move the losses of the stepper into the record of the step."""
        losses = self._parts.stepper.losses
        if losses:
            self._window.add_losses(losses)
            for call, value, count, request, _, _, term in losses:
                current["counted"] |= count is not None
                if request.examples and len(request.parts) == 1:
                    current["shard_losses"].append(
                        [request.parts[0].shard, request.parts[0].micro, call, term, float(value)]
                    )
            losses.clear()

    def before_update(self, optimizer: torch.optim.Optimizer, places: list[Tensor]) -> list[Tensor]:
        current = self._current
        if current is not None:
            self._keep_optimizer_options(current, optimizer)
            if current["updates"]:
                current["between"] += [
                    name for name, made in self._digests().items() if current["after"].get(name, made) != made
                ]
            self._keep_gradients(current)
            if not self._spec.is_subject and self._world.size == 1 and not self._has_independent_replicas():
                return self._load_reference_gradients(optimizer, current["updates"])
        return places

    def after_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the gradients of the first evaluation of the optimizer's closure.

        The first evaluation uses the weights that the step started from. Later evaluations, and the update, depend on
        this run's gradients.
        """
        current, self._evaluations = self._current, self._evaluations + 1
        if current is not None and self._evaluations == 1:
            self._keep_optimizer_options(current, optimizer)
            self._keep_gradients(current)
            current["own"] = True

    def _keep_optimizer_options(self, current: dict[str, Any], optimizer: Any) -> None:
        current["options"] += optimizer_options(optimizer)
        current["lrs"] += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

    def _keep_gradients(self, current: dict[str, Any]) -> None:
        """Save the gradients of the next update. They replace gradients that were already saved for this update."""
        gradients, update = self._gradients(), current["updates"]
        place = f"{len(self._steps)}-{update}"
        if self._replicated and self._world.size > 1:
            digests = {name: digest(gradient) for name, gradient in gradients.items()}
            current["gradient_digests"] = [*current["gradient_digests"][:update], digests]
        if self._world.rank == 0 or not self._replicated:
            self._write(f"grad-{place}-r{self._world.rank}", gradients)
            if self._spec.is_subject:
                self._write(f"take-{place}-r{self._world.rank}", gradients, whole=True)
        current["not_finite"] += [name for name, g in gradients.items() if not bool(g.isfinite().all())]

    def _load_reference_gradients(self, optimizer: Any, update: int) -> list[Tensor]:
        """Replace the gradients by those of the subject run, and return the parameters with a gradient. If the subject
        run saved no finite gradients, keep the gradients of this run."""
        found = load_gradients(self._reference_folder, len(self._steps), update)
        if not all(bool(gradient.isfinite().all()) for gradient in found.values()):
            found = {}  # the subject run made no update with them
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters if found else ():
            given = found.get(self._parts.names[p])
            p.grad = None if given is None else given.to(p.device, p.dtype if p.grad is None else p.grad.dtype)
        return [p for p in parameters if p.grad is not None]

    def before_close(self) -> None:
        with contextlib.suppress(OSError):
            self._write_record()
        if self._call_hook is not None:
            self._call_hook.remove()
        self._patches.undo()

    # --- steps

    def _begin_step(self, epoch: int, number: int) -> None:
        """Complete the previous step, and begin the new step from its given state."""
        self._complete_step()
        step = len(self._steps)
        if self._parts.chunks:
            self._end_trial()
        if step == self._spec.steps:
            if self._parts.independent or self._has_independent_replicas():
                self._keep_final_weights()
            self._end_trial()
        if self._replicated:
            watch_hooks(self._parts.names, self._changing_hooks)
        current = new_step_record(epoch, number)
        current["start"] = self._digests()
        last = self._steps[-1]["after"] if self._steps else None
        current["outside"] = [name for name, made in current["start"].items() if last and last.get(name, made) != made]
        if not step or not (self._parts.independent or self._has_independent_replicas()):
            state = self._state()
            if state is None:  # the ranks' states differ; the record of this step shows where
                if self._replicated:
                    current["optimizer"] = optimizer_digests(self._parts.optimizers, self._parts.names)
                self._steps.append(current)
                self._end_trial()
            self._share_start_state(state, current["outside"])
        if self._parts.in_sequence:
            buffers = [buffer for model in self._parts.models for buffer in model.buffers()]
            self._buffers_at_start = [(buffer, buffer.clone()) for buffer in buffers]
        self._window = Window(self._run.device)
        self._current = current
        if self._tracer is not None:
            self._tracer.begin_step(step)

    def _share_start_state(self, state: dict[str, Any], outside: Sequence[str]) -> None:
        """The subject run writes its state; every other run loads it."""
        step, main = len(self._steps), self._world.rank == 0
        path = os.path.join(self._reference_folder, f"state-{step}.safetensors")
        if self._spec.is_subject:
            self._disk_full = step > 1 and not world_group().broadcast(
                main and has_disk_space(state, self._reference_folder)
            )
            if self._disk_full:
                self._end_trial()
            if main:
                save_state(state, path)
                self._write(f"start-{step}", named_tensors(state["models"]))
                if self._parts.independent:
                    Path(self._reference_folder, "shard_losses").touch()
            return
        own = named_tensors(state["models"])
        if main and not step:
            self._write("initial", own)
        if main and outside:
            self._write(f"own-{step}", {name: own[name] for name in outside})
        if (given := load_state(path)) is None:  # the subject run made no more steps
            self._end_trial()
        if self._spec.whole_batches or self._spec.rank_0_of_1:
            keep_own_options(state, given)
        if self._spec.perturbed:
            nudge_weights(given["models"], set(self._parts.names.values()), seed=step)
        self._parts.strategy.load_state_dict(given)
        if self._tracer is not None:
            self._tracer.accept_options()

    def _has_independent_replicas(self) -> bool:
        """Whether the replicas of the subject run are independent between averagings."""
        return not self._spec.is_subject and os.path.exists(os.path.join(self._reference_folder, "shard_losses"))

    def _keep_final_weights(self) -> None:
        """Save the weights of independent replicas after the last step."""
        state = self._state()
        if self._world.rank == 0 and state is not None:
            self._write("end", named_tensors(state["models"]))

    def _end_trial(self) -> NoReturn:
        self._write_record()
        raise TrialEnded(0)

    def _state(self) -> dict[str, Any] | None:
        """The whole state. None (on all ranks) if the strategy refuses because the ranks hold different values or
        different tensors."""
        try:
            return self._parts.strategy.state_dict()
        except ModelError:
            return None
        except UsageError as error:
            if DIFFERENT_TENSORS not in str(error):
                raise
            return None

    def _complete_step(self) -> None:
        current, self._current = self._current, None
        if current is None or not current["updates"]:
            return
        current["losses"] |= {key.removeprefix(LOSS): list(pair) for key, pair in self._window.totals().items()}
        self._steps.append(current)

    # --- saved values

    def _gradients(self) -> dict[str, Tensor]:
        """The whole gradients, by name. A collective call if gradients are sharded."""
        found = {}
        for parameter, name in self._parts.names.items():
            grad = self._gradient(parameter)
            if grad is not None:
                found[name] = grad.full_tensor() if dtensor.is_sharded(grad) else grad  # type: ignore[attr-defined]
        return found

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        try:
            return parameter.grad
        except UsageError as error:
            raise UsageError(
                "paceline verify compares gradients, and this strategy does not expose them. Use --strategy fsdp, "
                "which shards the model in the same way. Or use `paceline compare`, which compares losses."
            ) from error

    def _digests(self) -> dict[str, str]:
        """Digests of this rank's weights and buffers, if it holds them whole."""
        if not self._replicated:
            return {}
        values = named_tensors([model.state_dict() for model in self._parts.models])
        return {name: digest(value) for name, value in values.items() if not dtensor.is_sharded(value)}

    def _write(self, name: str, tensors: Mapping[str, Tensor], whole: bool = False) -> None:
        """Write tensors to a file. whole: write whole tensors, for other runs to load. Otherwise write sketches of
        large tensors, for comparison."""
        save_tensors(tensors if whole else sketched(tensors), os.path.join(self._spec.directory, f"{name}.safetensors"))

    def _write_record(self) -> None:
        if self._written:
            return
        self._written = True
        if self._tracer is not None:
            self._tracer.close()
        unfinished = self._current["modules"] if self._current is not None and not self._current["updates"] else []
        self._complete_step()
        record = {
            **rank_record(self._run, self._parts, self._replicated),
            "rank": self._world.rank,
            "steps": self._steps,
            "unfinished": unfinished,
            "normalised": self._used_batch_norm,
            "hooked": sorted(self._changing_hooks),
            "ahead": self._parts.stepper.ownership.prefetched,
            "full": self._disk_full,
        }
        with open(self._path + ".part", "w") as file:
            json.dump(record, file)
        os.replace(self._path + ".part", self._path)
