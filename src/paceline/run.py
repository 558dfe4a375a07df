"""Run, the object that a script uses. It delegates every task to another module."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm import mesh
from paceline.comm.mesh import world_group
from paceline.comm.replicas import separate
from paceline.config import Settings
from paceline.data import randomness
from paceline.data.batch_plan import BatchPlan, one_shard
from paceline.data.foreign_names import of_run
from paceline.data.loader import Loader, current_examples
from paceline.data.noise import Noise, check_modules, make_noise
from paceline.data.sources import PACELINE_ARGUMENTS, LoaderArguments, make_sources
from paceline.data.user_batches import RowCollate, RowDataset, Rows, check_batches
from paceline.data.zero_rows import ZERO_ROWS
from paceline.errors import CheckpointError, ModelError, UsageError
from paceline.metrics import metrics, predict_files
from paceline.metrics.predict import check_options, on_first_input, predict
from paceline.monitor import media
from paceline.monitor.monitor import Monitor
from paceline.monitor.summary import Totals
from paceline.monitor.trackers import Tracker
from paceline.norm.normalisation import Normalisation
from paceline.state import pretrained, sharded_export
from paceline.state.averaged_weights import ModelEMA, weights_of
from paceline.state.checkpoint import Retention
from paceline.state.hyperparameters import Hyperparameters, HyperparameterSource, check_source
from paceline.state.pretrained import LoadedNames, Names
from paceline.state.restarts import Restarts
from paceline.state.run_position import Epochs, RunPosition
from paceline.state.sharded_export import bytes_of
from paceline.state.state import State, fits, model_number
from paceline.step import backends, deterministic
from paceline.step.call_check import CallCheck, by_all
from paceline.step.freed_memory import keep_freed_memory
from paceline.step.guards import Guards
from paceline.step.heartbeat import Heartbeat
from paceline.step.messages import PREPARED_LATE, SAVED_IN_MID_BATCH, under_no_grad
from paceline.step.objective import step_by_closure
from paceline.step.observer import StepObserver
from paceline.step.precision import Precision
from paceline.step.preparable import (
    check_optimizer,
    check_preparable,
    check_scheduler,
    compile_module,
    unwrapped,
    with_loaders,
    without_wrapper,
)
from paceline.step.step import Stepper
from paceline.strategies import make
from paceline.strategies.base import Strategy, Weight
from paceline.strategies.kit.deferred import Filling, Init, allocate, is_deferred
from paceline.strategies.kit.named_parameters import listed, parameter_names
from paceline.world import World

YieldHook = Callable[[Loader], None]


class RunParts(NamedTuple):
    """The parts of a run, for `paceline.fit` and for tools that observe a run."""

    strategy: Strategy
    stepper: Stepper
    names: Mapping[Tensor, str]  # parameter, or tensor that holds its gradient -> the parameter's name
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    noise: Noise | None
    normalisation: Normalisation
    totals: Totals

    @property
    def runs_closure(self) -> bool:
        """Does the strategy call the script's closure itself, on several micro-batches per yield?"""
        return self.strategy.plan.bundled

    @property
    def splits_closure(self) -> bool:
        """Does the closure run in stages, so that no process runs all of it or holds the whole model?"""
        return self.strategy.plan.whole_shards

    @property
    def independent(self) -> bool:
        """Do the replicas have different weights between two averagings?"""
        return self.strategy.mesh.independent

    @property
    def in_step(self) -> bool:
        """Do all processes compute each global batch together, and make one update from it?"""
        return self.strategy.plan.in_step and not self.independent

    @property
    def chunks(self) -> int:
        """Number of chunks that a work queue splits each global batch into; 0 without a work queue."""
        plan = self.strategy.plan
        return 0 if plan.in_step else plan.shards

    @property
    def in_sequence(self) -> int:
        """Number of shards that a process computes in sequence; 0 if it computes one, or all at once."""
        return self.strategy.plan.sequential


class Run:
    """One training run, as one process sees it. Created by `paceline.start`.

    Attributes:
        world, device, settings, seed: rank and world size, this process's device, the settings, and the seed.
        latest: the training or evaluation loader that yielded last.
        calls: checks that all processes make the same collective calls.
        restarts: saves and restores state when the run is stopped or loses a rank.
        explanation: returns a clearer error for an exception from the user's forward, or None.
        closed: whether the run has ended.
    """

    def __init__(self, world: World, settings: Settings, device: torch.device, *, trial: bool = False) -> None:
        """trial: this is a run of `paceline verify` or `compare`, so it restores nothing and writes no files."""
        self.world = world
        self.settings = settings
        self.device = device
        self.seed = settings.seed
        self._strategy = make(settings.strategy, world, device, settings.reproducible)
        self._precision = Precision(settings.precision, device, fp32_outputs=settings.fp32_outputs)
        self._noise = make_noise(settings, self._strategy.plan)
        self._normalisation = Normalisation(settings.batch_norm, self._strategy, quiet=settings.progress == "off")
        self._guards = Guards()
        self._guards.watch_backward(lambda: self._strategy.store.parameters)
        self.calls = CallCheck(self._strategy)
        self._models: list[nn.Module] = []
        self._stepper = Stepper(
            self._strategy,
            self._models,
            self.calls,
            self._precision,
            self._guards,
            device=device,
            skip=settings.nonfinite == "skip",
            nonfinite_every=settings.nonfinite_every,
            deterministic_by=settings.deterministic_by,
        )
        self.explanation = self._stepper.explanation
        self._state = State(
            self._strategy,
            Hyperparameters(self._guards.allow),
            device=device,
            seed=settings.seed,
            reproducible=settings.reproducible,
        )
        if self._precision.scaler is not None:
            self._state.parts["scaler"] = self._precision.scaler
        self._optimizers: list[torch.optim.Optimizer] = []
        self._monitor = Monitor(world, settings, device, self._stepper, self._models)
        self._epochs = Epochs(lambda: list(self._state.loaders.values()), self._strategy, self.main)
        self._position = RunPosition(self._stepper, self._epochs)
        self.latest: Loader | None = None
        self._evaluations = self._averages = 0  # number of evaluation loaders and of weight averages so far
        self._strategy.mesh.replicas = self._strategy.mesh.layers
        mesh.use(self._strategy.mesh)
        randomness.seed_all(randomness.mix(settings.seed, randomness.tag("start")), device)
        self.restarts = Restarts(
            *(world, self._stepper, self._state, self._position, self._models, self._optimizers),
            steps=lambda: self.steps,
            save=self._save_last,
            saving=self._saving,
        )
        self._heartbeat = Heartbeat()
        self._observers: list[StepObserver] = []
        self._trial = trial
        self._unfilled: dict[int, Sequence[str]] = {}  # number of a model -> names of tensors without values
        self._normalises = False  # does a prepared model have batch norm?
        self._restored = False  # has the run been restored, and yielded no training batch since?
        self._on_training_yield: tuple[YieldHook, ...] = ()
        self._on_evaluation_yield: tuple[YieldHook, ...] = ()
        self.closed = False
        self._put_backends_back = backends.apply(settings)
        if device.type == "cpu":
            keep_freed_memory()
        self._state.begin()
        self._choose_hooks()

    def _choose_hooks(self) -> None:
        """Rebuild the hooks that run when a loader yields, in order. Call again when one of them changes."""
        first: list[YieldHook] = [self._heartbeat] if self._heartbeat.beats else []
        first += [self._check_filled] if self._unfilled else []
        first += [observer.before_yield for observer in self._observers]
        last: list[YieldHook] = [self._monitor.on_yield] if self._monitor.active else []
        last += [observer.after_yield for observer in self._observers]
        inner: list[YieldHook] = [self._on_first_batch] if self._restored else []
        self._normalises = self._normalisation.active
        inner += [self._normalisation.on_yield] if self._normalises else []
        self._on_training_yield = (*first, *inner, self._stepper.ownership.on_yield, *last)
        self._on_evaluation_yield = (*first, self._on_evaluation, *last)

    def _save_last(self, directory: Path) -> Path:
        """Save the checkpoint for the next start. If an earlier background save failed, only print its error."""
        try:
            self._state.wait_for_save()
        except CheckpointError as error:
            if self.main:
                print(f"paceline: {error}", file=sys.stderr, flush=True)
        return self.save(directory)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        for observer in self._observers:
            observer.in_save(True)
        try:
            with self._monitor.saving():
                yield
        finally:
            for observer in self._observers:
                observer.in_save(False)

    @property
    def main(self) -> bool:
        """Whether this process is rank 0."""
        return self.world.rank == 0

    @property
    def rank(self) -> int:
        """The number of this process, from 0 to world_size - 1. The model must not depend on it."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.world.size

    @by_all
    def wait(self) -> None:
        """Waits until every process has called it."""
        world_group().barrier()

    @by_all
    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value on every process, such as the name of a directory. All processes call it.

        value: None, numbers, strings, bytes, paths, dates, tensors, NumPy arrays, and lists, tuples, sets, dicts and
        argparse.Namespaces of these. Tensors arrive on the CPU. Other types raise UsageError: nothing is pickled.
        """
        return world_group().broadcast(value, what="run.broadcast(value)")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(of_run(name))

    # --- the objects of a run

    def prepare(self, *objects: Any, init: Init | bool = True) -> Any:
        """Adds models, optimizers, learning-rate schedulers and training loaders to the run, and returns them.

        Models move to `run.device`. Every rank gets rank 0's weights. Models keep their class, names and methods.
        `run.step` then updates the optimizers, and advances the schedulers once per optimizer step. For a DataLoader,
        `prepare` returns a training loader; the DataLoader's batch becomes the global batch. For a model from
        torch.compile, `prepare` returns the original model, compiled, with its parameter names; you may keep using the
        wrapper. Call `prepare` again to add more objects. Load pretrained weights before `prepare`, or after it on
        every rank (`run.load_pretrained` reads files).

        init: for a model that was built under torch.device("meta"), of which each process then allocates only its part.
        True: call each module's `reset_parameters` (transformers: `_init_weights`); draws depend on the seed and the
        module's name, not on the number of processes or the strategy. A function: call it for each module, children
        first, as nn.Module.apply does. False: leave the values to `run.restore` or `run.load_pretrained`; a batch
        before that raises UsageError.

        Raises UsageError for any other object, and for an optimizer with parameters that no prepared model has, and
        ModelError for tensors on "meta" that nothing fills.
        """
        objects = tuple(map(without_wrapper, objects))
        for observer in self._observers:
            observer.before_prepare(objects)
        models = [thing for thing in objects if isinstance(thing, nn.Module)]
        optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
        schedulers = [thing for thing in objects if isinstance(thing, LRScheduler)]
        for thing in objects:
            check_preparable(thing)
        for model in models:
            if not any(model is prepared for prepared in self._models):
                self._precision.convert(model)
                if self.settings.channels_last:
                    backends.channels_last(model)
                if self.settings.deterministic_by:
                    deterministic.convert(model)
                if self.settings.compile:
                    compile_module(model, self.settings.compile)
                self._models.append(model)
        if self._noise is not None:
            check_modules(self._models)
        for model in self._models:  # also models of earlier calls: the user may have added a layer
            self._normalisation.convert(model)
        self._fill_deferred(init or self._trial)  # a trial restores nothing
        separate(self._strategy.mesh, self._models)
        names = parameter_names(self._models)
        for optimizer in optimizers:
            self._add_optimizer(optimizer, names)
        plan = self._strategy.plan
        self._strategy.setup(self._models, self._optimizers)
        if self.latest is not None and self._strategy.plan is not plan:
            raise ModelError(PREPARED_LATE)
        self.restarts.prepared()
        names = parameter_names(self._models)  # again: the strategy may have replaced parameters
        for scheduler in schedulers:
            self._add_scheduler(scheduler)
        self._stepper.updates.follow(names)
        self._choose_hooks()
        made = with_loaders(objects, self.loader, bool(self._state.loaders))
        for observer in self._observers:
            observer.after_prepare()
        return made[0] if len(made) == 1 else made

    def _fill_deferred(self, init: Init | bool) -> None:
        """Fill models that were built on "meta": here, or in the strategy's `setup`."""
        fillings = {
            number: Filling(model, randomness.mix(self.seed, randomness.tag("initialisation"), number), init)
            for number, model in enumerate(self._models)
            if is_deferred(model)
        }

        def fill(model: nn.Module) -> None:
            number = next(number for number in fillings if self._models[number] is model)
            fillings[number]()
            if fillings[number].unfilled:
                self._unfilled[number] = fillings[number].unfilled
                self._choose_hooks()

        if fillings and not self._strategy.fill_with(fill):
            for number in fillings:
                allocate([*self._models[number].parameters(), *self._models[number].buffers()], torch.device("cpu"))
                fill(self._models[number])

    def _check_filled(self, _: object = None) -> None:
        """Raises UsageError for weights without values."""
        for number, names in self._unfilled.items():
            raise UsageError(
                f"{len(names)} tensor(s) of {type(self._models[number]).__name__} have no values yet: {listed(names)}. "
                "run.prepare(..., init=False) leaves them to run.restore or run.load_pretrained. Load them before the "
                "first batch, or drop init=False."
            )

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
        if optimizer in self._optimizers:
            return
        check_optimizer(optimizer, names)
        self._optimizers.append(optimizer)
        self._state.hyperparameters.add(optimizer)
        self._stepper.updates.add(optimizer)

    def _add_scheduler(self, scheduler: Any) -> None:
        if scheduler in self._state.schedulers:
            return
        check_scheduler(scheduler, self._optimizers)
        self._state.schedulers.append(scheduler)
        self._state.hyperparameters.add_scheduler(scheduler)
        self._guards.watch_scheduler(scheduler)

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int | Mapping[int, int] | None = None,
        micro_batch: int | None = None,
        shuffle: bool = False,
        train: bool = True,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        name: str | None = None,
        shuffle_buffer: int | None = None,
        collate: str = "example",
        limit_batches: int | float | None = None,
        **options: Any,
    ) -> Loader:
        """Returns a loader that yields this process's shard of each global batch, on `run.device`.

        Args:
            dataset: map-style or iterable. Every process reads the whole stream of an iterable data set, and keeps its
                part. A data set of shards is read in parts (docs/data.md, Streams): one with `shards` and
                `read(shard, position)`, or a streaming one of Hugging Face.
            global_batch: examples per optimizer step, over all devices. {0: 64, 4: 128} means 128 from epoch 4 on.
            micro_batch: the largest number of examples that a replica computes at once.
            shuffle: reorder the data in each epoch, depending on the seed. An iterable data set is shuffled in a buffer
                of `shuffle_buffer` examples.
            train: False for evaluation: each example counts once, every pass yields the same batches, and the random
                streams of training do not advance.
            sampler: a custom sampler over the whole data set, not over one rank's part.
            batch_sampler: a custom sampler of global batches.
            drop_last: leave out a short last global batch.
            name: identifies the loader's position in checkpoints. Required with several training loaders.
            shuffle_buffer: buffer size for shuffling an iterable data set. Default: 1,000.
            collate: the examples that collate_fn receives. "example": this process's shard; torch draws with one row
                per example are the same for any number of processes. "global": the whole global batch on every process,
                for a collate_fn that mixes examples or draws in other ways. "shard": this process's shard, with
                separate random draws, so that the model depends on the number of shards.
            limit_batches: use this number (int) or fraction (float) of the global batches of each epoch or pass.
            options: num_workers, collate_fn, pin_memory, prefetch_factor, persistent_workers, worker_init_fn, timeout,
                multiprocessing_context, as in torch.utils.data.DataLoader.

        Raises SettingError for invalid or contradictory arguments.
        """
        given: dict[str, Any] = {
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "shuffle": shuffle,
            "train": train,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            "drop_last": drop_last,
            "name": name,
            "shuffle_buffer": shuffle_buffer,
            "collate": collate,
            "limit_batches": limit_batches,
            "pin_memory": self.device.type == "cuda",
            **options,
        }
        for observer in self._observers:
            observer.before_loader(dataset, given)
        if name is None:
            given["name"] = "train" if train else f"evaluation {self._evaluations}"
        self._evaluations += not train
        plan = (lambda: self._strategy.plan) if train else self._evaluation_plan
        size = given.pop("global_batch")
        loading = {key: given.pop(key) for key in PACELINE_ARGUMENTS & given.keys()}
        sources = make_sources(dataset, LoaderArguments(**loading, options=given), size, seed=self.seed, plan=plan)
        hooks: Any = {"on_yield": self._on_yield, "on_end": self._on_end}
        hooks["on_body_end"] = self.restarts.after_batch
        loader = Loader(sources.pop(0), device=self.device, noise=self._noise, later=sources, **hooks)
        if train:
            self._state.add_loader(loader)
        for observer in self._observers:
            observer.after_loader(loader)
        return loader

    def batches(
        self,
        fn: Callable[[Rows], Any],
        *,
        global_batch: int,
        steps: int | None = None,
        micro_batch: int | None = None,
        train: bool = True,
        name: str | None = None,
        collate: str = "example",
        **options: Any,
    ) -> Loader:
        """Returns a loader with batches that a function makes: random pieces of a text, episodes, generated numbers.

        fn(rows) returns a batch of len(rows) rows. rows: a sequence of positions in the global batch, with the
        attributes `step`, `epoch` and `total`. On one process it has all positions, else those of this process's shard.
        If fn draws one row per position with torch, such as torch.randint(n, (len(rows),)), the draws do not depend on
        the number of processes.

        Args:
            fn: without num_workers, it is called just before each yield, so it may use the model.
            global_batch: rows per optimizer step, over all devices.
            steps: global batches per epoch. By default an epoch is endless, and the loop needs a `break`.
            micro_batch, train, name, collate, options: as in `loader`.

        Raises SettingError for invalid arguments.
        """
        check_batches(fn, global_batch, steps, options)
        loading: dict[str, Any] = {"micro_batch": micro_batch, "train": train, "name": name, "collate": collate}
        loading["collate_fn"] = RowCollate(fn, global_batch)
        return self.loader(RowDataset(global_batch, steps), global_batch=global_batch, **loading, **options)

    def _evaluation_plan(self) -> BatchPlan:
        """The plan of an evaluation pass that begins now: a shard for each live process of the data-parallel group.

        With `balance`, the shards have the sizes of the latest cut.
        """
        data, sizes = self._strategy.mesh.data, self._strategy.plan.shard_sizes
        plan = one_shard(data.size, data.rank)
        return plan.with_cut(sizes.newest) if sizes is not None and len(sizes.newest) == data.size else plan

    def _on_yield(self, loader: Loader) -> None:
        self.latest = loader
        for hook in self._on_training_yield if loader.train else self._on_evaluation_yield:
            hook(loader)

    def _on_first_batch(self, _: Loader) -> None:
        """Finish the restore at the first training batch after it."""
        self._restored = False
        self._choose_hooks()
        self._state.locks.before_batch()
        self._epochs.on_training_yield()

    def _on_evaluation(self, loader: Loader) -> None:
        """Synchronize the replicas at the first batch of an evaluation pass."""
        request = loader.current
        if request is not None and request.step == request.micro == 0:
            self._stepper.updates.synchronize()

    def _on_end(self, loader: Loader, whole: bool) -> None:
        for observer in self._observers:
            observer.before_end(loader, whole)
        if loader.train:
            self._stepper.ownership.on_end(loader, whole)
            if whole:
                self._stepper.updates.drain()
        self._stepper.updates.catch_up(self._state.schedulers)
        self._monitor.on_end(loader, whole)
        for observer in self._observers:
            observer.after_end(loader, whole)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields epoch numbers from 0 to count - 1. A restored run starts at the epoch where it stopped."""
        numbers = self._stepper.ownership.between_epochs(self._epochs.up_to(count))
        return self._monitor.epochs(numbers, count, self._stepper.updates.synchronize)

    # --- the step

    def forward_backward(
        self,
        loss_fn: Callable[[Any, Any], Any],
        model: Any,
        batch: Any,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        of: Loader | None = None,
    ) -> Tensor:
        """Computes a loss and its gradients. Works under every strategy.

        loss_fn(model, batch) returns a mean over the examples, a paceline.Total(sum, count), or a tuple of these, which
        are added. model: a prepared module, or a tuple, list or dict of them. optimizer: compute gradients for its
        parameters only. of: the loader that yielded the batch, if you iterate several training loaders together.

        Returns this process's loss, a detached 0-dim tensor (NaN if its shard is empty). `run.mean` gives the global
        loss.
        """
        if not torch.is_grad_enabled():
            raise UsageError(under_no_grad("forward_backward"))
        for observer in self._observers:
            observer.before_backward(())
            loss_fn = observer.closure(loss_fn)
        loss = self._stepper.forward_backward(loss_fn, unwrapped(model), batch, optimizer, of)
        for observer in self._observers:
            observer.after_backward()
        return loss

    def backward(
        self,
        loss: Tensor | None = None,
        *,
        total: Tensor | None = None,
        count: Weight | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        of: Loader | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Adds a loss's gradients, as `loss.backward()` does in a script for one device.

        - backward(loss): a mean over this micro-batch's examples.
        - backward(loss, count=n): a mean over n things, such as tokens.
        - backward(total=s, count=n): a sum over n things.
        - backward(total=s): a plain sum over the global batch, not divided.

        Several calls for one micro-batch add up. optimizer, of: as in forward_backward. After the last call of a global
        batch, `.grad` is the exact mean over the global batch, unscaled.
        """
        if not torch.is_grad_enabled():
            raise UsageError(under_no_grad("backward"))
        if (loss is None) == (total is None):
            raise UsageError("run.backward: pass either a loss, or total= with count=, but not both.")
        value = total if loss is None else loss
        if self._observers and isinstance(value, Tensor):
            factor = math.prod(observer.before_backward((value,)) for observer in self._observers)
            if factor != 1:
                loss, total = (None if one is None else one * factor for one in (loss, total))
        self._stepper.backward(loss, total, count, optimizer, of, retain_graph)
        for observer in self._observers:
            observer.after_backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        closure: Callable[[], object] | None = None,
        *,
        max_grad_norm: float | None = None,
    ) -> bool:
        """Makes an update if the global batch is complete; otherwise does nothing. Returns whether it was complete.

        An update clips the gradients to `max_grad_norm` (the 2-norm over all gradients of this optimizer), steps the
        optimizer, advances its prepared schedulers, and zeroes its gradients. You may omit the optimizer if only one is
        prepared. Raises UsageError if no backward came before. With nonfinite="stop", raises NonFiniteError: on a CPU
        before the update, on an accelerator up to 2 x nonfinite_every updates later.

        closure: for an optimizer that evaluates the loss itself, several times per step (torch.optim.LBFGS). The
        closure clears the gradients, computes the loss of the batch, calls run.backward or run.forward_backward, and
        returns the loss. Each evaluation covers the whole global batch, and the optimizer gets the same mean loss on
        all processes. Works under single and ddp, without micro-batches.
        """
        chosen = optimizer
        if chosen is None and len(self._optimizers) == 1:
            chosen = self._optimizers[0]
        schedulers = [scheduler for scheduler in self._state.schedulers if scheduler.optimizer is chosen]
        if closure is not None and max_grad_norm is not None:
            raise UsageError(
                "run.step(optimizer, closure, max_grad_norm=...): clip in the closure, after run.backward."
            )
        for observer in self._observers:
            observer.before_step()
        if closure is not None:
            step_by_closure(self._stepper, chosen, schedulers, closure)
            acted = True
        elif self._noise is None:
            acted = self._stepper.updates.step(chosen, schedulers, max_grad_norm)
        else:
            with self._noise.suspended():
                acted = self._stepper.updates.step(chosen, schedulers, max_grad_norm)
        if acted and self._normalises:
            self._normalisation.average_statistics(self._models, self._stepper.ownership.fetched_ahead)
        for observer in self._observers:
            observer.after_step(acted)
        return acted

    @property
    def steps(self) -> int:
        """Number of updates that the first prepared optimizer has made. Without a prepared optimizer: number of global
        batches for which the script has used and cleared the gradients itself."""
        if self._optimizers:
            return self._stepper.updates.counts[self._optimizers[0]]
        return self._stepper.ownership.count_manual_updates()

    @property
    def skipped(self) -> int:
        """Number of updates (of this replica, if replicas are independent) skipped since a gradient was not finite."""
        return self._stepper.updates.left_out

    # --- numbers over all processes

    @by_all
    def mean(self, values: Any) -> Any:
        """Returns the exact mean over the examples of all processes, even if some have fewer examples or none.

        values: a tensor with one row per example; or a number that is the mean over this process's current batch, such
        as a loss; or a dict of such values. Returns a float, or a dict of floats.
        """
        for observer in self._observers:
            observer.on_request()
        return metrics.mean(values, lambda: current_examples(self.latest, self._state.loaders.values()), self.device)

    @by_all
    def ratio(self, sum: Any, count: Any) -> float:
        """Returns the sum of `sum` over all processes, divided by the sum of `count` over all processes."""
        for observer in self._observers:
            observer.on_request()
        return metrics.ratio(sum, count, self.device)

    @by_all
    def sum(self, values: Any) -> Any:
        """Returns the sum over all processes of a number, a tensor, or a dict of these. Integers stay integers."""
        for observer in self._observers:
            observer.on_request()
        return metrics.total(values, self.device)

    @by_all
    def gather(self, values: Any) -> Any:
        """Collects values from all processes, in rank order. Tensors are joined along dimension 0, differentiably.
        Lists are joined. Other objects are returned as a list with one entry per process."""
        for observer in self._observers:
            observer.on_request()
        return metrics.gather(values)

    @by_all
    def predict(
        self,
        model: Any,
        dataset: Any,
        *,
        global_batch: int,
        fn: Callable[[Any, Any], Any] | None = None,
        to: str | Path | None = None,
        resume: bool = False,
        rows_per_file: int | None = None,
        **options: Any,
    ) -> Any:
        """Returns the model's result for each example of a data set, in order, on the CPU of every process; or writes
        the results to files.

        fn(model, batch) returns a tensor or list with one entry per example, or a dict or tuple of these. Default:
        model(batch), or model(batch[0]) if the batch is a tuple or list. The model runs in evaluation mode, without
        gradients. options: micro_batch, num_workers, collate_fn and so on, as in `loader`.

        Returns a tensor (examples, ...) for tensors, or a list of rows if they differ in shape; a list for lists; and
        the same dicts and tuples as fn. An iterable data set is read to its end, in the order of the stream. Raises
        UsageError for other results.

        to: write to this new folder instead, and return its path (docs/evaluate.md, "To files"). Each process writes
        separate files during the pass, with at most rows_per_file examples each. resume: continue an interrupted pass
        in that folder, on any number of processes. If the pass is complete, do nothing.
        """
        check_options(options)
        if to is not None:
            target = predict_files.Target(Path(to), resume, rows_per_file)
            with weights_of(model) as model:
                return self._predict_to(target, model, dataset, global_batch, fn or on_first_input, options)
        if resume or rows_per_file is not None:
            raise UsageError("run.predict(resume=..., rows_per_file=...) also needs a folder: to=...")
        loader = self.loader(dataset, global_batch=global_batch, train=False, **options)
        with weights_of(model) as model, metrics.evaluating(model):
            return predict(model, fn or on_first_input, loader, self.autocast)

    def _predict_to(
        self,
        target: predict_files.Target,
        model: Any,
        dataset: Any,
        global_batch: int,
        fn: Callable[[Any, Any], Any],
        options: dict[str, Any],
    ) -> Path:
        if self._trial:
            return target.folder
        sizes = predict_files.cut(target, dataset, global_batch, options.pop("micro_batch", None))
        left = predict_files.start(target, dataset, self._state.digest(self._models, model))
        if left is not None:
            options["sampler"] = left
        loader = self.loader(dataset, train=False, **sizes._asdict(), **options) if left != [] else None
        with metrics.evaluating(model):
            return predict_files.write(model, fn, loader, self.autocast, target)

    @by_all
    def compute(self, metric: Any) -> Any:
        """Returns the value of a torchmetrics metric or collection over all processes. It is exact even if some
        processes have few or no examples. All processes call it. The metric does not change."""
        return metrics.compute(metric)

    # --- logging

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Shows and records numbers: run.log(accuracy=0.9), run.log({"loss/val": value}).

        All processes call it, with the same names. Values are numbers or 0-dim tensors. In a training batch, a value is
        a mean over this process's examples; the mean over `log_every` steps and all processes is written. In an
        evaluation pass, the mean over the pass is written. Elsewhere, the mean over the processes is written at once.
        In a training or evaluation batch, the call does not wait for the device.
        """
        self._monitor.log(values, named)

    def log_hyperparameters(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Records hyperparameters in the trackers: run.log_hyperparameters(vars(args)). Rank 0's values are written."""
        self._monitor.log_hyperparameters(media.hyperparameters(values, named))

    def log_image(self, name: str, image: Any) -> None:
        """Records rank 0's image in the trackers that support images. Waits for the device.

        image: a tensor or array of shape (3, height, width), (1, height, width) or (height, width), with floats from 0
        to 1 or integers from 0 to 255.
        """
        self._monitor.log_media("log_image", name, lambda: media.image(name, image))

    def log_histogram(self, name: str, values: Any) -> None:
        """Records the distribution of rank 0's values, such as a weight or a gradient, in the trackers that support
        histograms. values: a tensor or array of any shape. Waits for the device."""
        self._monitor.log_media("log_histogram", name, lambda: media.histogram(name, values))

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on rank 0 only, above a progress bar. Takes the arguments of print."""
        if self.main:
            print(*values, **options)

    def add_tracker(self, tracker: Tracker) -> None:
        """Also sends logged values to an object with begin, log and close (docs/logging.md). Call it on all ranks."""
        if self._trial:
            return
        self._monitor.add_tracker(tracker, self.latest)
        self._choose_hooks()

    # --- state

    def track(self, **objects: Any) -> None:
        """Adds objects with state_dict and load_state_dict (an EMA, a best score) to checkpoints, by name.

        state_dict() is called on rank 0 only. Exception: under ddp with --max-restarts, it is called on all ranks after
        each step (docs/reliability.md). If an object's state is spread over processes, give the object a method
        before_save() that gathers the state: all processes call it before each checkpoint.
        """
        for name, thing in objects.items():
            self._state.add_tracked(name, thing)

    @overload
    def save(
        self,
        directory: str | Path,
        *,
        keep: int | None = ...,
        keep_best: int = ...,
        score: float | None = ...,
        mode: str = ...,
        background: Literal[False] = ...,
    ) -> Path: ...
    @overload
    def save(
        self,
        directory: str | Path,
        *,
        keep: int | None = ...,
        keep_best: int = ...,
        score: float | None = ...,
        mode: str = ...,
        background: bool,
    ) -> Path | None: ...
    @by_all
    def save(
        self,
        directory: str | Path,
        *,
        keep: int | None = None,
        keep_best: int = 0,
        score: float | None = None,
        mode: str = "min",
        background: bool = False,
    ) -> Path | None:
        """Writes a checkpoint into a new directory in `directory`, and returns its path. All processes call it.

        keep: the number of newest checkpoints to keep. keep_best: also keep this number of checkpoints with the best
        scores. score: the score of this checkpoint; rank 0's value is used. mode: whether the lowest ("min") or the
        highest ("max") scores are best.

        background: return None as soon as the state is copied in memory. A thread writes the checkpoint while training
        continues. Only one checkpoint is written at a time: the next save, `restore`, `wait_for_save` and the
        end of the run first wait for the thread. If it could not write the checkpoint, they raise CheckpointError on
        every process.

        Raises UsageError in the middle of a global batch, and CheckpointError if the checkpoint cannot be written;
        earlier checkpoints then stay untouched.
        """
        if self._trial:
            for observer in self._observers:
                observer.in_save(True)
            return Path(directory) / f"step-{self.steps:08d}"
        self._check_filled()
        retention = Retention(keep, keep_best, score, mode)
        self._stepper.updates.prepare_save()
        if self._stepper.ownership.incomplete:
            raise UsageError(SAVED_IN_MID_BATCH)
        with self._saving():
            path = self._state.save(directory, self.steps, retention, self._position.counters(), background=background)
        self.restarts.saved(Path(directory))
        return path

    @by_all
    def wait_for_save(self) -> Path | None:
        """Waits for the last save with background=True, and returns its path. Returns None if no result is pending. All
        processes call it. Raises CheckpointError if the checkpoint could not be written."""
        return self._state.wait_for_save()

    @by_all
    def restore(
        self, directory: str | Path, *, missing_ok: bool = False, hyperparameters: HyperparameterSource = "checkpoint"
    ) -> bool:
        """Loads the newest complete checkpoint in `directory`, or the checkpoint `directory` itself. It may have been
        saved under any strategy and by any number of processes. Call `restore` after `prepare`; create loaders and
        tracked objects before or after it.

        hyperparameters: if the script's learning rate or other optimizer options have changed, use the values of the
        "checkpoint" or of the "script". With "script", the script's schedule is advanced to the current step.
        Differences are printed. Momenta and similar state always come from the checkpoint.

        Returns whether a checkpoint was restored. Raises CheckpointError if there is none (unless missing_ok), if it is
        damaged, or if it belongs to another program.
        """
        if self._trial:
            return False
        if not self._models:
            raise UsageError("run.restore before run.prepare: prepare the models and optimizers to restore first.")
        check_source(hyperparameters)
        self._state.hyperparameter_source = hyperparameters
        found = self._state.restore(directory, missing_ok, self.restarts.kept)
        self.restarts.restored(Path(directory))
        if found is not None:
            self._filled(dict.fromkeys(self._unfilled, ()))
            with fits(directory):
                self._position.load_counters(found)
            self._monitor.restored(self._state.restored_from, self.steps)
        self._restored = True
        self._choose_hooks()
        self.restarts.begin()
        return found is not None

    @by_all
    def load_pretrained(
        self,
        path: str | Path,
        model: nn.Module | None = None,
        *,
        names: Names | None = None,
        missing_ok: bool = False,
    ) -> LoadedNames:
        """Reads weights into a prepared model: from a directory in the layout of Hugging Face's models (safetensors,
        with model.safetensors.index.json if there are several files), or from one safetensors file. Each process reads
        only its own part, under every strategy. All processes call it, after `prepare` and before the first batch.

        Values are converted to the dtypes of the model. Of a tied parameter, one of its names suffices. By default
        names are those of the model; for a model of transformers, a base model's weights also fit a model with a head,
        and the reverse.

        Args:
            path: a directory, or a file. It need not be on a disk that all processes see.
            model: may be omitted if one model is prepared.
            names: from names in the files to names in the model: beginnings to replace, such as {"module.": ""}, or
                a function, which returns None to leave a tensor out.
            missing_ok: keep the present values of tensors that the files lack, such as a new head.

        Returns (missing, unexpected) names; unexpected ones are also warned of. Raises CheckpointError if tensors are
        missing, have another shape, or cannot be read; no weights were changed then, unless a file breaks off.
        """
        number = model_number(self._models, unwrapped(model), "load_pretrained")
        found = pretrained.load(path, self._models[number], number, self._strategy, names, missing_ok)
        self._filled({number: [name for name in self._unfilled.get(number, ()) if name in found.missing]})
        return found

    def _filled(self, left: Mapping[int, Sequence[str]]) -> None:
        """Note which tensors have no values after some were loaded. left: number of a model -> names."""
        self._unfilled = {number: names for number, names in {**self._unfilled, **left}.items() if names}
        self._choose_hooks()

    @by_all
    def export(
        self, path: str | Path, model: nn.Module | ModelEMA | None = None, *, shards: str | int | None = None
    ) -> None:
        """Writes a model, or an average from `run.ema`, to one safetensors file, which the plain model class can load.
        All processes call it. Raises NonFiniteError as `step` does.

        shards: write a directory instead, in the layout of Hugging Face's models, which `from_pretrained` and
        `run.load_pretrained` load: safetensors files of at most this size ("5GB", or bytes), an index, and the model's
        configuration if it has one with a `save_pretrained`. No host holds more than one of these files besides its
        own part of the model. Names that transformers ties are written once.
        """
        most = None if shards is None else bytes_of(shards)
        if self._trial:
            for observer in self._observers:
                observer.in_save(True)
            return
        self._check_filled()
        self._stepper.updates.drain()
        with weights_of(model) as module:
            number = model_number(self._models, unwrapped(module))
            if most is None:
                self._state.export(path, number)
            else:
                sharded_export.export(path, self._models[number], number, self._strategy, most)

    def ema(self, model: nn.Module, decay: float = 0.999) -> ModelEMA:
        """Returns an exponential moving average of a prepared model's weights, for evaluation and export. Under every
        strategy it is sharded like the weights. Checkpoints include it. All processes create and update it:

            ema = run.ema(model, decay=0.999)
            ...
            run.step(optimizer)
            ema.update()
            ...
            paceline.evaluate(ema, loss_fn, test_set, global_batch=64)
            run.export("ema.safetensors", ema)

        Buffers are not averaged. For other uses, `with ema.in_model():` puts the average into the model. Raises
        SettingError for a decay outside [0, 1), and UsageError for a model that is not prepared.
        """
        model = unwrapped(model)
        number = next((number for number, prepared in enumerate(self._models) if prepared is model), None)
        if number is None:
            raise UsageError(f"run.ema: this {type(model).__name__} is not prepared. Call run.prepare(model) first.")
        made = ModelEMA(model, number, self._strategy, decay, lambda: self._stepper.updates.made or self.steps)
        self._averages += 1
        self._state.add_tracked("ema" if self._averages == 1 else f"ema {self._averages}", made)
        return made

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the block on rank 0 first, then on the first process of each other machine, then on all others."""
        turn = 0 if self.main else 1 if self.world.local_rank == 0 else 2
        with self.calls.call("run.main_first"):
            for _ in range(turn):
                world_group().barrier()
        try:
            yield
        finally:
            for _ in range(2 - turn):
                world_group().barrier()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns an autocast context in the run's precision, for code outside a prepared model's forward."""
        return self._precision.autocast()

    def close(self) -> None:
        """Ends the run: removes hooks, stops threads, and frees buffers. The process may then start another run.

        After closing, raises NonFiniteError if gradients of the last steps on an accelerator were not finite, or
        CheckpointError if a background checkpoint could not be written."""
        if self.closed:
            return
        for observer in self._observers:
            observer.before_close()
        self.closed = True
        try:
            self._close()
        finally:
            for observer in self._observers:
                observer.after_close()

    def _close(self) -> None:
        try:
            # After an exception, raise no further error: the user should read the first.
            if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
                self._stepper.updates.drain()
                self._stepper.ownership.warn_unstepped()
                self._state.end_saves(self.calls)
        finally:
            try:
                self._state.close()
            finally:
                self._end()

    def _end(self) -> None:
        for loader in self._state.loaders.values():
            loader.close()
        self._monitor.close()
        self._put_backends_back()
        ZERO_ROWS.close()
        if self._noise is not None:
            self._noise.close()
        self._guards.close()
        self.restarts.close()
        self._heartbeat.close()
        self._strategy.close()
        self._strategy.mesh.close()
        mesh.use(None)


def observe(run: Run, make: Callable[[Run, RunParts], StepObserver]) -> None:
    """Attach an observer to a run. make: creates it from the run and its parts."""
    run._observers.append(make(run, parts_of(run)))
    run._stepper.watch(run._observers)
    run._choose_hooks()


def parts_of(run: Run) -> RunParts:
    """The parts of a run. They stay valid until the run ends."""
    return RunParts(
        run._strategy,
        run._stepper,
        run._stepper.updates.names,
        run._models,
        run._optimizers,
        run._noise,
        run._normalisation,
        run._monitor.totals,
    )
