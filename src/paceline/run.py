"""Run: what a script holds. Thin: it delegates, and decides nothing twice."""

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

from paceline.comm import collectives, mesh
from paceline.comm.replicas import ProcessReplicas, separate
from paceline.config import Settings
from paceline.data import randomness
from paceline.data.batch_plan import BatchPlan, one_shard
from paceline.data.elsewhere import of_run
from paceline.data.loader import Loader, current_examples
from paceline.data.made_batches import RowCollate, RowDataset, Rows, check_batches
from paceline.data.noise import Noise, check_modules, make_noise
from paceline.data.sources import OWN_ARGUMENTS, LoaderArguments, make_sources
from paceline.data.zero_rows import ZERO_ROWS
from paceline.errors import CheckpointError, ModelError, UsageError
from paceline.metrics import metrics, predict_files
from paceline.metrics.predict import check_options, on_first_input, predict
from paceline.monitor import media
from paceline.monitor.monitor import Monitor
from paceline.monitor.trackers import Tracker
from paceline.norm.normalisation import Normalisation
from paceline.state.averaged_weights import ModelEMA, weights_of
from paceline.state.checkpoint import Retention
from paceline.state.hyperparameters import Hyperparameters, Whose, check_whose
from paceline.state.restarts import Restarts
from paceline.state.run_position import Epochs, RunPosition
from paceline.state.state import State, fits, model_number
from paceline.step import backends, deterministic
from paceline.step.call_check import CallCheck, by_all
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
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.world import World

YieldHook = Callable[[Loader], None]


class RunParts(NamedTuple):
    """What a run is made of, for the tools that observe it and for `paceline.fit`."""

    strategy: Strategy
    stepper: Stepper
    names: Mapping[Tensor, str]  # of each prepared parameter, and of each place of its gradient
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    noise: Noise | None
    normalisation: Normalisation


class Run:
    """One training run, seen from one process. Made by `paceline.start`.

    Attributes:
        world, device, settings, seed: of the run.
        latest: the loader that yielded last.
        calls: compares the calls in which all processes take part.
        restarts: what lets the run go on after it was stopped or has lost a rank.
        explanation: returns a better error than one of the user's forward; None where there is none.
        closed: has the run ended?
    """

    def __init__(self, world: World, settings: Settings, device: torch.device, *, trial: bool = False) -> None:
        """trial: a run of `paceline verify` or `compare`, which restores and writes nothing."""
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
        self._evaluations = self._averages = 0  # how many loaders and averages the script has made
        self._strategy.mesh.replicas = ProcessReplicas(self._strategy.mesh.layers)
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
        self._normalises = False  # whether a prepared model has batch norm
        self._restored = False  # whether the run was restored, and no training batch has come since
        self._on_training_yield: tuple[YieldHook, ...] = ()
        self._on_evaluation_yield: tuple[YieldHook, ...] = ()
        self.closed = False
        self._put_backends_back = backends.apply(settings)
        self._state.begin()
        self._choose_hooks()

    def _choose_hooks(self) -> None:
        """What is called when a loader yields, in order. Called again when this changes."""
        first: list[YieldHook] = [self._heartbeat] if self._heartbeat.beats else []
        first += [observer.before_yield for observer in self._observers]
        last: list[YieldHook] = [self._monitor.on_yield] if self._monitor.active else []
        last += [observer.after_yield for observer in self._observers]
        own: list[YieldHook] = [self._on_first_batch] if self._restored else []
        self._normalises = self._normalisation.active
        own += [self._normalisation.on_yield] if self._normalises else []
        self._on_training_yield = (*first, *own, self._stepper.ownership.on_yield, *last)
        self._on_evaluation_yield = (*first, self._on_evaluation, *last)

    def _save_last(self, directory: Path) -> Path:
        """Save what is handed over to the next start. That an earlier checkpoint could not be written does not keep
        this newer one from being tried."""
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
        """Whether this is rank 0."""
        return self.world.rank == 0

    @property
    def rank(self) -> int:
        """The number of this process, from 0 to world_size - 1. A model must not depend on it."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return self.world.size

    @by_all
    def wait(self) -> None:
        """Returns when every process has come here."""
        collectives.barrier()

    @by_all
    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every process, such as the name of a directory. All processes call it.

        value: None, numbers, strings, bytes, paths, dates, tensors, NumPy arrays, and lists, tuples, sets, dicts and
        argparse.Namespaces of these. Tensors come on the CPU. Raises UsageError for anything else, since nothing is
        pickled.
        """
        return collectives.broadcast_object(value, what="run.broadcast(value)")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(of_run(name))

    # --- the objects of a run

    def prepare(self, *objects: Any) -> Any:
        """Takes models, optimizers, learning-rate schedulers and training loaders into the run, and returns them.

        Models move to `run.device`, with the weights of rank 0 on every rank; they keep their class, names and methods.
        Optimizers are then moved by `run.step`, and schedulers with them, once per optimizer step. A DataLoader comes
        back as the training loader of this run; its batch is the global batch. In place of torch.compile's wrapper the
        model itself comes back, compiled, with its own names; the wrapper may be used as before. May be called again to
        add more. Load pretrained weights before or after it (then on every rank).

        Raises UsageError for anything else, and for an optimizer of parameters that no prepared model has.
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
            if not any(model is own for own in self._models):
                self._precision.convert(model)
                if self.settings.channels_last:
                    backends.channels_last(model)
                if self.settings.deterministic_by:
                    deterministic.convert(model)
                if self.settings.compile:
                    compile_module(model)
                self._models.append(model)
        if self._noise is not None:
            check_modules(self._models)
        for model in self._models:  # also those of earlier calls: a layer may have been added
            self._normalisation.convert(model)
        separate(self._strategy.mesh, self._models)
        names = parameter_names(self._models)
        for optimizer in optimizers:
            self._add_optimizer(optimizer, names)
        plan = self._strategy.plan
        self._strategy.setup(self._models, self._optimizers)
        if self.latest is not None and self._strategy.plan is not plan:
            raise ModelError(PREPARED_LATE)
        self.restarts.prepared()
        names = parameter_names(self._models)  # anew: a strategy may have put others in their place
        for scheduler in schedulers:
            self._add_scheduler(scheduler)
        self._stepper.updates.follow(names)
        self._choose_hooks()
        made = with_loaders(objects, self.loader, bool(self._state.loaders))
        for observer in self._observers:
            observer.after_prepare()
        return made[0] if len(made) == 1 else made

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
        """A loader that yields this process's part of each global batch, on `run.device`.

        Args:
            dataset: map-style, or iterable (then every process reads the whole stream and keeps its part).
            global_batch: examples of one optimizer step, over all devices; {0: 64, 4: 128} is 128 from epoch 4 on.
            micro_batch: the most examples that one replica computes at once.
            shuffle: another order in each epoch, of the seed; for an iterable data set among `shuffle_buffer` examples.
            train: False for evaluation: each example counts once, every pass is alike, and training is not disturbed.
            sampler: the user's own, over the whole data set (not a part for each rank).
            batch_sampler: likewise, of whole global batches.
            drop_last: leave out a last global batch that is short.
            name: by which a checkpoint keeps its position; needed where a run has several training loaders.
            shuffle_buffer: among how many waiting examples an iterable data set is shuffled; 1,000 if not given.
            collate: what collate_fn is handed. "example": this process's part; rows that it draws with torch belong to
                their examples. "global": the whole global batch on every process, for what mixes examples or draws
                otherwise. "shard": this process's part, with draws of its own, which changes the model.
            limit_batches: use so many global batches of an epoch or pass (an int), or this part of them (a float).
            options: num_workers, collate_fn, pin_memory, prefetch_factor, persistent_workers, worker_init_fn, timeout,
                multiprocessing_context, as of torch.utils.data.DataLoader.

        Raises SettingError for arguments that cannot be, or contradict each other.
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
        own = {key: given.pop(key) for key in OWN_ARGUMENTS & given.keys()}
        sources = make_sources(dataset, LoaderArguments(**own, options=given), size, seed=self.seed, plan=plan)
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
        """A loader whose batches a function makes: random pieces of a text, episodes, numbers drawn on the fly.

        fn(rows) returns a batch of len(rows) rows. rows: a sequence of the positions in the global batch that it is to
        make (`rows.step`, `rows.epoch`, `rows.total`); on one process all, else this process's part. What it draws with
        torch and a row for each, as torch.randint(n, (len(rows),)), is the same whoever makes it.

        Args:
            fn: is called for each yield, just before it (without num_workers), so that it may use the model.
            global_batch: rows of one optimizer step, over all devices.
            steps: global batches in an epoch; not given, they have no end, and the loop needs a `break`.
            micro_batch, train, name, collate, options: as of `loader`.

        Raises SettingError for arguments that cannot be.
        """
        check_batches(fn, global_batch, steps, options)
        own: dict[str, Any] = {"micro_batch": micro_batch, "train": train, "name": name, "collate": collate}
        own["collate_fn"] = RowCollate(fn, global_batch)
        return self.loader(RowDataset(global_batch, steps), global_batch=global_batch, **own, **options)

    def _evaluation_plan(self) -> BatchPlan:
        """Evaluation is sharded over the processes with different examples, as many as live when a pass begins."""
        data = self._strategy.mesh.data
        return one_shard(collectives.size_of(data), collectives.rank_of(data))

    def _on_yield(self, loader: Loader) -> None:
        self.latest = loader
        for hook in self._on_training_yield if loader.train else self._on_evaluation_yield:
            hook(loader)

    def _on_first_batch(self, _: Loader) -> None:
        """The first training batch of a restored run."""
        self._restored = False
        self._choose_hooks()
        self._state.locks.before_batch()
        self._epochs.on_training_yield()

    def _on_evaluation(self, loader: Loader) -> None:
        """The first batch of an evaluation synchronizes replicas."""
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
        """Epoch numbers from 0 to count - 1; in a restored run from where it stopped."""
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

        loss_fn(model, batch) returns a mean over the examples; or paceline.Total(sum, count); or a tuple of these,
        which add. model: a prepared module, or a tuple, list or dict of them. optimizer: touch only its parameters.
        of: the loader that the batch is from, where several training loaders are iterated together.

        Returns this process's loss, a detached 0-dim tensor (NaN where its shard is empty); `run.mean` gives the
        global one.
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

        backward(loss): a mean over this micro-batch's examples. backward(loss, count=n): a mean over n things, such as
        tokens. backward(total=s, count=n): a sum over n things. backward(total=s): a plain sum over the global batch,
        divided by nothing. Several calls for one micro-batch add. optimizer, of:
        as for forward_backward. After the last one of a global batch `.grad` is the exact mean over it, unscaled.
        """
        if not torch.is_grad_enabled():
            raise UsageError(under_no_grad("backward"))
        if (loss is None) == (total is None):
            raise UsageError("run.backward: give a loss, or total= with count=, and not both.")
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
        """Updates, when the global batch is complete; else does nothing. Returns whether it was complete.

        Then it clips the gradients to `max_grad_norm` (the 2-norm of all of this optimizer's together), updates, moves
        the prepared schedulers of this optimizer, and zeroes its gradients. The optimizer may be left out where one is
        prepared. Raises UsageError without a backward before it, and NonFiniteError (with nonfinite="stop"): on a CPU
        before the update; on an accelerator up to 2 x nonfinite_every updates later.

        closure: for an optimizer that evaluates the loss itself, several times in a step (torch.optim.LBFGS): clears
        the gradients, computes the loss of the batch, calls run.backward or run.forward_backward, and returns the loss.
        Each evaluation is of the whole global batch; the optimizer gets its mean loss, alike on all processes. Under
        single and ddp, without micro-batches.
        """
        chosen = optimizer
        if chosen is None and len(self._optimizers) == 1:
            chosen = self._optimizers[0]
        schedulers = [scheduler for scheduler in self._state.schedulers if scheduler.optimizer is chosen]
        if closure is not None and max_grad_norm is not None:
            raise UsageError("run.step(optimizer, closure, max_grad_norm=...): the closure clips, after run.backward.")
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
        """Updates that the first prepared optimizer has made. Where none is prepared, global batches whose gradients
        the script has used and cleared itself."""
        if self._optimizers:
            return self._stepper.updates.counts[self._optimizers[0]]
        return self._stepper.ownership.count_manual_updates()

    @property
    def skipped(self) -> int:
        """Updates that were left out because a gradient was not finite; of replicas that train apart this one's."""
        return self._stepper.updates.left_out

    # --- numbers over all processes

    @by_all
    def mean(self, values: Any) -> Any:
        """The mean over the examples of all processes, exact where they have unequally many, or none.

        values: a tensor with an example in each row; or a number that is the mean over this process's current batch,
        such as a loss; or a dict of these. Returns a float.
        """
        for observer in self._observers:
            observer.on_request()
        return metrics.mean(values, lambda: current_examples(self.latest, self._state.loaders.values()), self.device)

    @by_all
    def ratio(self, sum: Any, count: Any) -> float:
        """Sum of the sums / sum of the counts, over all processes."""
        for observer in self._observers:
            observer.on_request()
        return metrics.ratio(sum, count, self.device)

    @by_all
    def sum(self, values: Any) -> Any:
        """The sum over all processes of a number, a tensor, or a dict of these. Whole numbers stay whole."""
        for observer in self._observers:
            observer.on_request()
        return metrics.total(values, self.device)

    @by_all
    def gather(self, values: Any) -> Any:
        """A tensor: all processes' joined along dimension 0, in rank order, differentiable. A list: all lists joined.
        Anything else: a list of all processes' objects."""
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
        """The result for each example of a data set, once, in its order, on the CPU of every process; or in files.

        fn(model, batch) returns a tensor or list with an entry for each example, or a dict or tuple of these; if not
        given, model(batch), or model(batch[0]) of a batch that is a tuple or list. The model is in evaluation mode
        meanwhile, and without gradients. options: micro_batch, num_workers, collate_fn and so on, as of `loader`.

        Returns a tensor (examples, ...) for a tensor, or a list of its rows where they differ in shape; a list for a
        list; in dicts and tuples as fn returned them. An iterable data set is read to its end, and its order is that of
        the stream. Raises UsageError for other results.

        to: a new folder. Each process writes its results there as it goes, at most rows_per_file examples into a file,
        and the folder's path is returned (docs/fit.md, "To files"). resume: the folder may be that of a pass that was
        stopped, on any number of processes, which then goes on; or of one that ended, and nothing is done.
        """
        check_options(options)
        if to is not None:
            target = predict_files.Target(Path(to), resume, rows_per_file)
            with weights_of(model) as model:
                return self._predict_to(target, model, dataset, global_batch, fn or on_first_input, options)
        if resume or rows_per_file is not None:
            raise UsageError("run.predict(resume=..., rows_per_file=...): they belong to a folder, to=...")
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
        cut = predict_files.cut(target, dataset, global_batch, options.pop("micro_batch", None))
        left = predict_files.start(target, dataset, self._state.digest(self._models, model))
        if left is not None:
            options["sampler"] = left
        loader = self.loader(dataset, train=False, **cut._asdict(), **options) if left != [] else None
        with metrics.evaluating(model):
            return predict_files.write(model, fn, loader, self.autocast, target)

    @by_all
    def compute(self, metric: Any) -> Any:
        """The value of a torchmetrics metric or collection over all processes, exact where one has few or no examples.
        All processes call it; the metric itself stays as it was."""
        return metrics.compute(metric)

    # --- what one sees

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Shows and records numbers: run.log(accuracy=0.9), run.log({"loss/val": value}). All processes call it alike.

        Numbers or 0-dim tensors. In a training batch a value is a mean over this process's examples there, and the mean
        over `log_every` steps and all processes is written; in an evaluation pass that over the pass. Elsewhere it is
        written at once, as the mean over the processes. In a batch nothing is read from the device at the call.
        """
        self._monitor.log(values, named)

    def log_hyperparameters(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Records settings of the script in the trackers: run.log_hyperparameters(vars(args)). Rank 0's are written."""
        self._monitor.log_hyperparameters(media.hyperparameters(values, named))

    def log_image(self, name: str, image: Any) -> None:
        """Records rank 0's image in the trackers that take images: a tensor or array (3, height, width), (1, height,
        width) or (height, width), of floats from 0 to 1 or of whole numbers to 255. Waits for the device."""
        self._monitor.log_media("log_image", name, lambda: media.image(name, image))

    def log_histogram(self, name: str, values: Any) -> None:
        """Records the distribution of rank 0's values, such as a weight or a gradient, in the trackers that take
        histograms: a tensor or array of any shape. Waits for the device."""
        self._monitor.log_media("log_histogram", name, lambda: media.histogram(name, values))

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on rank 0 only, above a progress bar. Arguments as of print."""
        if self.main:
            print(*values, **options)

    def add_tracker(self, tracker: Tracker) -> None:
        """Has what is logged go to an object with begin, log and close too (docs/logging.md); alike on all ranks."""
        if self._trial:
            return
        self._monitor.add_tracker(tracker, self.latest)
        self._choose_hooks()

    # --- state

    def track(self, **objects: Any) -> None:
        """Puts objects with state_dict and load_state_dict (an EMA, a best score) into checkpoints, by name.

        state_dict() is called on rank 0 alone; under ddp, where the launcher starts ranks again after a failure, on all
        after each step (docs/reliability.md). An object whose state lies on several processes gathers it in
        before_save(), which all processes call, if it has one, before each checkpoint.
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
        """Writes a checkpoint into a new directory below `directory`, and returns its path. All processes call it.

        keep: how many of the newest checkpoints to leave there. keep_best: how many more to leave, those with the best
        scores; mode: whether "min" or "max" is best. score: of this checkpoint, rank 0's.

        background: returns None as soon as rank 0 has copied everything in its memory; a thread there writes, and
        training goes on. One checkpoint is written at a time: the next save, `restore`, `wait_for_save` and the end of
        the run wait for it first, and raise its CheckpointError on every process where it could not be written.

        Raises UsageError in the middle of a global batch, CheckpointError where it cannot be written; earlier
        checkpoints are then untouched.
        """
        if self._trial:
            for observer in self._observers:
                observer.in_save(True)
            return Path(directory) / f"step-{self.steps:08d}"
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
        """Waits until the last save with background=True is on the disk, and returns the path of its checkpoint; None
        where there is none to wait for. All processes call it. Raises CheckpointError where it could not be written."""
        return self._state.wait_for_save()

    @by_all
    def restore(
        self, directory: str | Path, *, missing_ok: bool = False, hyperparameters: Whose = "checkpoint"
    ) -> bool:
        """Puts back the newest whole checkpoint of `directory` (or the one that it is), of any strategy and number of
        processes. Call it after `prepare`; loaders and tracked objects may be made before or after it.

        hyperparameters: whose learning rate and other options of optimizers the run goes on with, where the script was
        changed since: the "checkpoint"'s, or those of this "script", whose schedule is then moved on to the step at
        hand. What differs is printed. Momenta and the like are the checkpoint's in both cases.

        Returns False where there is none, with missing_ok. Raises CheckpointError: none, damaged, of another program.
        """
        if self._trial:
            return False
        if not self._models:
            raise UsageError("run.restore before run.prepare: prepare the models and optimizers that it is to fill.")
        check_whose(hyperparameters)
        self._state.whose = hyperparameters
        found = self._state.restore(directory, missing_ok, self.restarts.kept)
        self.restarts.restored(Path(directory))
        if found is not None:
            with fits(directory):
                self._position.load_counters(found)
            self._monitor.restored(self._state.restored_from, self.steps)
        self._restored = True
        self._choose_hooks()
        self.restarts.begin()
        return found is not None

    @by_all
    def export(self, path: str | Path, model: nn.Module | ModelEMA | None = None) -> None:
        """Writes a model, or the average of `ema`, as one safetensors file that its plain class loads. All processes
        call it. Raises NonFiniteError as `step` does."""
        if self._trial:
            for observer in self._observers:
                observer.in_save(True)
            return
        self._stepper.updates.drain()
        with weights_of(model) as whose:
            self._state.export(path, model_number(self._models, unwrapped(whose)))

    def ema(self, model: nn.Module, decay: float = 0.999) -> ModelEMA:
        """The exponential moving average of a prepared model's weights, for evaluation and export. It lies where the
        weights lie, under every strategy, and is in the checkpoints. All processes make and update it:

            ema = run.ema(model, decay=0.999)
            ...
            run.step(optimizer)
            ema.update()
            ...
            paceline.evaluate(ema, loss_fn, test_set, global_batch=64)
            run.export("ema.safetensors", ema)

        Buffers are the model's own. `with ema.in_model():` gives the model the average for other uses. Raises
        SettingError for a decay that is not in [0, 1), UsageError for a model that is not prepared.
        """
        model = unwrapped(model)
        number = next((number for number, own in enumerate(self._models) if own is model), None)
        if number is None:
            raise UsageError(f"run.ema: this {type(model).__name__} is not prepared. Call run.prepare(model) first.")
        made = ModelEMA(model, number, self._strategy, decay, lambda: self._stepper.updates.made or self.steps)
        self._averages += 1
        self._state.add_tracked("ema" if self._averages == 1 else f"ema {self._averages}", made)
        return made

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, then the first process of each other machine, then all others."""
        turn = 0 if self.main else 1 if self.world.local_rank == 0 else 2
        with self.calls.call("run.main_first"):
            for _ in range(turn):
                collectives.barrier()
        try:
            yield
        finally:
            for _ in range(2 - turn):
                collectives.barrier()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The chosen precision, for a part of a loop that does not go through a prepared model's forward."""
        return self._precision.autocast()

    def close(self) -> None:
        """Ends the run: hooks, threads and buffers. The process may start another one.

        Raises, when all is closed, NonFiniteError for a last step whose gradients an accelerator has not told of yet,
        and CheckpointError for a checkpoint that could not be written in the background."""
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
            if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:  # else the error is what to read
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
    """Has a tool watch a run. make: is given the run and its parts."""
    run._observers.append(make(run, parts_of(run)))
    run._stepper.watch(run._observers)
    run._choose_hooks()


def parts_of(run: Run) -> RunParts:
    """The parts of a run. They live as long as the run."""
    return RunParts(
        run._strategy,
        run._stepper,
        run._stepper.updates.names,
        run._models,
        run._optimizers,
        run._noise,
        run._normalisation,
    )
