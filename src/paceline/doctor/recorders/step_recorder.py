"""Backward passes, optimizer steps, schedulers, clipping and loss scaling."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.recorders.host_sync_recorder import machine_state
from paceline.doctor.recorders.loss_graph import (
    gathered_constants,
    loss_divisor,
    loss_kind,
    loss_lines,
    loss_terms,
    mean_sizes,
)
from paceline.doctor.recorders.replica_recorder import ReplicaRecorder, parameters
from paceline.doctor.recorders.shared_state import NUMBER, number_of, set_number
from paceline.observe.event_log import EventLog
from paceline.observe.graph_lines import GraphLines
from paceline.torch_private.observed import measured_by_ddp, parts_of_schedule, scale_of, unscaled

_LENGTH = re.compile(
    r"(total|train\w*|max|decay|num)_?(steps|iters?|iterations|updates)$|^(t_max|total|steps)$", re.IGNORECASE
)
_MAX_MAGNITUDES = 120  # sums over gradients, since each sum waits for the device
_MAX_CLIPS = 50  # clipping calls with a measured effect
_MAX_COUNTED = 400  # inspected backward passes; recorded calls of zero_grad
_MAX_SHARDS, _SHARD_TOLERANCE = 24, 1e-4  # sharded gradients per optimizer; relative difference of their factors


class StepLimitReached(SystemExit):
    """Ends the script: it has made the requested optimizer steps."""


class _StepRecorder:
    """The state of training in this process. Optimizers and schedulers are numbered in order of construction."""

    def __init__(self, log: EventLog) -> None:
        self.log, self._shared, self.models = log, log.shared, log.shared.models
        self._optimizer_count = 0
        self._scheduler_count = 0
        self._scheduler_depth = 0  # nested calls of a scheduler's step under way: a scheduler may step others
        self._steps: dict[int, int] = {}  # optimizer -> number of steps made
        self.replicas = ReplicaRecorder(log)
        self._backward_count = 0
        self._graph_lines = GraphLines(log.stack)
        self._loss_lines: dict[tuple[Any, ...], dict[str, Any]] = {}  # the line of a backward -> loss_lines
        self._owner: Any = WeakIdKeyDictionary()  # parameter -> id(optimizer)
        self._scalers: list[Any] = []
        self._magnitude: float | None = None  # magnitude of the gradients after the last backward
        self._ratio_at_clip: float | None = None  # magnitude at the next clipping, divided by _magnitude
        self._magnitude_count = 0
        # optimizer -> numbers of the backward passes that its current gradients come from
        self._holds: dict[int | None, list[int]] = {}
        self._shards: dict[int, list[float]] = {}  # optimizer -> magnitudes of sharded gradients after that backward
        self._had_gradient: set[int] = set()  # id of each parameter with a gradient since its optimizer's last step

    # --- backward

    def around_backward(self, tensors: Any, *args: Any, **options: Any) -> Generator[None, Any, None]:
        log, shared, models = self.log, self._shared, self.models
        synced, local = sorted(models.synced_forwards), sorted(models.unsynced_forwards - models.synced_forwards)
        models.synced_forwards.clear()
        models.unsynced_forwards.clear()
        about: dict[str, Any] = {"synced": synced, "local": local}
        with log.overhead():  # even if this fails, the backward is recorded
            root = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if len(tensors) == 1 else None
            plain = (args[0] if args else options.get("grad_tensors")) is None
            about |= self._describe_loss(root if plain else None)
            gathered, shared.collectives.gathered = shared.collectives.gathered, []
            if gathered and root is not None:
                about["cut_at"] = gathered_constants(root, gathered)
            self._find_dropped(shared.optimizers, [])
            if any(models.has_script_hook(p) for o in shared.optimizers for p in parameters(o)):
                about["mean"] = "other"  # a hook may divide the gradients
            shared.collectives.invalidate(backward=True)
        op = "DDP's gradients" if synced else "backward"
        try:
            with shared.collectives.during(op, None) if synced else contextlib.nullcontext():
                yield
        except RuntimeError as error:
            log.record("refused", op=op, text=str(error)[:400])
            return
        finally:
            shared.collectives.invalidate()
            shared.backward_since_step = True
            self._graph_lines.after_pass()
        self._backward_count += 1
        shared.variables.pass_ended = False
        with log.overhead():
            self._note_gradients()
        models.has_reduced.update(synced)
        about["reached"] = {number: models.pop_reached(number) for number in synced}
        about |= shared.draws.take(models.rows)
        log.record("backward", unsent=models.sync_off, library=log.stack.called_by_library(), **about)

    def _describe_loss(self, root: torch.Tensor | None) -> dict[str, Any]:
        """The fields of a "backward" event about its loss. root=None: backward does not start from one plain loss."""
        if root is None or root.numel() != 1:
            return {"mean": "other", "form": "other", "count": None, "terms": [], "means": [], "lines": {}}
        kind, few = loss_kind(root), self._backward_count < _MAX_COUNTED
        count, terms, means = (loss_divisor(root), loss_terms(root), mean_sizes(root)) if few else (None, [], [])
        place = tuple(self.log.stack.caller())
        if self._graph_lines.on:
            self._loss_lines[place] = loss_lines(root, self._graph_lines.line_of)
        lines = self._loss_lines.get(place, {})
        return {"mean": kind, "form": kind, "count": count, "terms": terms, "means": means, "lines": lines}

    def _note_gradients(self) -> None:
        """After a backward, record the state of the gradients, to detect changes before the step."""
        optimizers = self._shared.optimizers
        self.replicas.after_backward(optimizers, lambda number: self._steps.get(number, 0))
        self._magnitude, self._ratio_at_clip = self._gradient_magnitude(), None
        self._had_gradient |= {id(p) for o in optimizers for p in parameters(o) if p.grad is not None}
        for o in optimizers:
            if any(p.grad is not None for p in parameters(o)):
                self._holds.setdefault(number_of(o), []).append(self._backward_count)
        self._shards = {number_of(o): self._shard_magnitudes(o) for o in optimizers}

    def _shard_magnitudes(self, optimizer: Any) -> list[float]:
        """The magnitudes of this rank's shards of some sharded gradients."""
        some = [p.grad for p in parameters(optimizer) if hasattr(p.grad, "to_local")][:_MAX_SHARDS]
        few = self._backward_count <= _MAX_COUNTED
        return [float(g.to_local().detach().abs().sum()) for g in some] if few else []

    def _shard_factor(self, optimizer: Any) -> float | None:
        """The factor that multiplied the sharded gradients since the last backward; None if their factors differ."""
        before, now = self._shards.get(number_of(optimizer), []), self._shard_magnitudes(optimizer)
        pairs = [(b, n) for b, n in zip(before, now) if b > 0]
        if not pairs or len(before) != len(now):
            return None
        factors = [n / b for b, n in pairs]
        return factors[0] if max(factors) - min(factors) <= _SHARD_TOLERANCE * max(factors) else None

    def after_zero_grad(self, thing: Any, /, *_: Any, **__: Any) -> None:
        """After zero_grad of an optimizer or a module, record dropped gradients."""
        self._find_dropped([thing] if isinstance(thing, Optimizer) else self._shared.optimizers, None)

    def _find_dropped(self, optimizers: Iterable[Any], at: list[Any] | None) -> None:
        """Record backward passes with gradients that were dropped before a step used them.

        at: [] if the line is unknown; None: the line of the current call.
        """
        for o in optimizers:
            number = getattr(o, "_paceline_doctor", None)  # Lightning's wrapper forwards this to the inner optimizer
            held = self._holds.get(number)
            if held and not any(_is_there(p.grad) for p in parameters(o)) and self.log.few("dropped", _MAX_COUNTED):
                self.log.record("dropped", at=at, opt=number, passes=list(held))
                held.clear()

    def _gradient_magnitude(self) -> float:
        """The sum of magnitudes in some gradients; 0.0 after _MAX_MAGNITUDES calls."""
        self._magnitude_count += 1
        if self._magnitude_count > _MAX_MAGNITUDES:
            return 0.0
        some = [p.grad for o in self._shared.optimizers for p in list(parameters(o))[:4] if p.grad is not None]
        return sum(float(g.detach().abs().sum()) for g in some if g.layout is torch.strided)

    def _rescaled(self) -> bool:
        """Has the script divided its gradients since the last backward? Unscaling and clipping do not count."""
        share = self._ratio_at_clip if self._ratio_at_clip is not None else self._gradient_ratio()
        return share is not None and share < 0.75

    def _gradient_ratio(self, scaled: bool = False) -> float | None:
        """The current magnitude of the gradients divided by their magnitude after the last backward.

        scaled: do both magnitudes contain the loss scale?
        """
        if not self._magnitude or self._magnitude_count >= _MAX_MAGNITUDES:
            return None
        factor = 1.0 if scaled else self._loss_scale()
        return self._gradient_magnitude() * factor / self._magnitude

    def _loss_scale(self) -> float:
        """The loss scale that multiplied the gradients of the last backward."""
        used = (s for s in self._scalers if getattr(s, "_paceline_doctor_scaled", False))
        return next((scale for s in used if (scale := scale_of(s)) is not None), 1.0)

    # --- optimizers

    def after_optimizer_init(self, optimizer: Any, /, *_: Any, **__: Any) -> None:
        number = optimizer.__dict__[NUMBER] = self._optimizer_count
        self._optimizer_count += 1
        self._shared.optimizers.add(optimizer)
        self.models.add_trained(list(parameters(optimizer)))
        self._owner.update({p: id(optimizer) for p in parameters(optimizer)})
        lrs = [_as_float(group.get("lr")) for group in optimizer.param_groups]
        self.log.record("optimizer", opt=number, lr=lrs)

    def before_step(self, optimizer: Any, args: Any, options: Any) -> None:
        log, number = self.log, number_of(optimizer)
        if number is None or not log.active:
            return
        made = self._steps.get(number, 0)
        if self._shared.steps is not None and made >= self._shared.steps:
            log.record("limit")
            raise StepLimitReached(0)
        with log.overhead():
            mine = [p for p in parameters(optimizer) if p.requires_grad]
            without = []
            if any(self._lacks_gradient(p) for p in mine):
                named = self.replicas.named(optimizer)
                without = [name for name, p in named if p.requires_grad and self._lacks_gradient(p)]
            lrs = [_as_float(group.get("lr")) for group in optimizer.param_groups]
            rescaled = self._rescaled()
            alike = self.replicas.before_step(optimizer, number, made)
            log.record(
                "before", opt=number, step=made, lr=lrs, without=without, parameters=len(mine), rescaled=rescaled,
                backwards=self._backward_count, scale=self._loss_scale(), logged=self._ddp_comm_seconds(),
                unwaited=self._shared.collectives.pop_unwaited(), shrunk=self._shard_factor(optimizer),
                uses=list(self._holds.get(number, [])), **alike,
            )  # fmt: skip

    def _lacks_gradient(self, parameter: torch.Tensor) -> bool:
        """Does the parameter have no gradient, or only zeros that did not come from a backward since the last step?"""
        grad = parameter.grad
        return grad is None or bool(self._had_gradient and id(parameter) not in self._had_gradient and not grad.any())

    def after_step(self, optimizer: Any, args: Any, options: Any) -> None:
        number, shared = number_of(optimizer), self._shared
        if number is None or not self.log.active:
            return
        made = self._steps[number] = self._steps.get(number, 0) + 1
        self._graph_lines.after_pass()
        shared.clipped_gradients, shared.backward_since_step = set(), False
        shared.draws.clear()
        self._holds.pop(number, None)
        self._had_gradient -= {id(p) for p in parameters(optimizer)}
        shared.collectives.invalidate()
        with self.log.overhead():
            alike = self.replicas.after_step(optimizer, number, made)
            state = machine_state() if self.replicas.is_compared(made) else None
            rescaled = self._rescaled()  # by a hook of the optimizer, or inside its step
            self._magnitude = self._ratio_at_clip = None
            self.log.record("step", now=True, opt=number, step=made, machine=state, rescaled=rescaled, **alike)

    def _ddp_comm_seconds(self) -> dict[int, float]:
        """DDP module -> seconds of communication, as DDP measured them in some iterations."""
        found = {}
        for module in list(self.models.ddp_modules):
            try:
                found[number_of(module)] = measured_by_ddp(module).get("avg_backward_comm_time", 0) / 1e9
            except Exception:  # a private API of torch
                continue
        return found

    def after_load_state_dict(self, thing: Any, /, *_: Any, **__: Any) -> None:
        """Record load_state_dict of an optimizer or a scheduler."""
        self.log.record("restored", opt=number_of(getattr(thing, "optimizer", thing)))

    # --- schedulers

    def patch_scheduler(self, cls: Any) -> None:
        """Patch a scheduler class: its constructor, and its load_state_dict and step if it defines them."""
        if "__init__" in vars(cls):
            self.log.patches.around(cls, "__init__", self.around_scheduler_init)
        if "load_state_dict" in vars(cls):
            self.log.patches.after(cls, "load_state_dict", self.after_load_state_dict)
        if "step" in vars(cls):
            self.log.patches.around(cls, "step", self.around_scheduler_step)

    def around_scheduler_init(self, scheduler: Any, /, *_: Any, **__: Any) -> Generator[None, Any, None]:
        first = number_of(scheduler) is None
        if first:
            set_number(scheduler, self._scheduler_count)
            self._scheduler_count += 1
        self._scheduler_depth += 1
        try:
            yield
        finally:
            self._scheduler_depth -= 1
        if first and not self._scheduler_depth:
            self.log.record("sched_made", sched=number_of(scheduler))

    def around_scheduler_step(self, scheduler: Any, /, *args: Any, **options: Any) -> Generator[None, Any, None]:
        if self._scheduler_depth:
            return
        given = args[0] if args else options.get("metrics")
        metric = _as_float(given) if isinstance(scheduler, ReduceLROnPlateau) else None
        optimizer = getattr(scheduler, "optimizer", None)
        self._scheduler_depth += 1
        try:
            yield
        except Exception as error:
            self.log.record("sched_error", text=str(error), **describe_scheduler(scheduler))
            return
        finally:
            self._scheduler_depth -= 1
        lrs = [_as_float(group.get("lr")) for group in getattr(optimizer, "param_groups", ())]
        library = self.log.stack.called_by_library()
        about = describe_scheduler(scheduler)
        self.log.record("sched", opt=number_of(optimizer), lr=lrs, library=library, metric=metric, **about)

    # --- clipping and scaling

    def around_clip(self, given: Any, *args: Any, **options: Any) -> Generator[None, Any, None]:
        parameters = [given] if isinstance(given, torch.Tensor) else list(given)
        scale = self._scale_in(parameters)
        if self._ratio_at_clip is None:
            self._ratio_at_clip = self._gradient_ratio(scale is not None)
        grads = [p.grad for p in parameters if p.grad is not None]
        before = _magnitudes(grads) if self.log.few("clips", _MAX_CLIPS) else []
        result = yield
        after = _magnitudes(grads) if before else []
        changed = any(a < b * (1 - 1e-3) for a, b in zip(after, before))
        norm = float(result) if isinstance(result, torch.Tensor) and before else None
        bound = _as_float(args[0] if args else next(iter(options.values()), None))
        self.log.record("clip", scale=scale, norm=norm, bound=bound, changed=changed)
        self._shared.clipped_gradients = {id(g) for g in grads} if changed else set()

    def _scale_in(self, parameters: list[torch.Tensor]) -> float | None:
        """The loss scale in the gradients of these parameters; None if they have none."""
        owners = {self._owner.get(p) for p in parameters}
        for scaler in self._scalers:
            scale = scale_of(scaler)
            if scale is not None and getattr(scaler, "_paceline_doctor_scaled", False) and not unscaled(scaler, owners):
                return scale
        return None

    def before_scale(self, scaler: Any, /, *_: Any, **__: Any) -> None:
        if all(scaler is not known for known in self._scalers):
            self._scalers.append(scaler)
        scaler._paceline_doctor_scaled = True

    def before_update(self, scaler: Any, /, *_: Any, **__: Any) -> None:
        scaler._paceline_doctor_scaled = False


def _given_a_list(original: Any) -> Any:
    """Wrap a clipping function: turn an iterator of parameters into a list, because the recorder reads it too."""

    def clip_(parameters: Any, *args: Any, **options: Any) -> Any:
        parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
        return original(parameters, *args, **options)

    return clip_


def _magnitudes(gradients: list[torch.Tensor]) -> list[float]:
    return [float(g.detach().abs().sum()) for g in gradients[:64]]


def _is_there(grad: torch.Tensor | None) -> bool:
    """Is there a gradient with an element other than 0? Of a sharded gradient, only the local shard is read."""
    if grad is None or grad.layout is not torch.strided:
        return grad is not None
    own = grad.to_local() if hasattr(grad, "to_local") else grad
    return bool(own.detach().any())


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """The fields that describe a scheduler in its events. horizon: its length in its own steps, or None."""
    kind, name, horizon = _schedule_length(scheduler)
    base = _as_float(next(iter(getattr(scheduler, "base_lrs", [])), None))
    count = getattr(scheduler, "last_epoch", None)
    about = {"type": kind, "horizon": horizon, "name": name, "base": base, "count": count}
    return {"sched": number_of(scheduler), **about}


def _schedule_length(scheduler: Any) -> tuple[str, str, int | None]:
    """(class, name of the length setting, length) of a scheduler; for a SequentialLR, of all parts together."""
    kind = type(scheduler).__name__
    parts, start = parts_of_schedule(scheduler)
    if kind == "SequentialLR" and parts:
        kind, name, horizon = _schedule_length(parts[-1])
        return kind, f"sequence's end ({start} + {name})", None if horizon is None else start + horizon
    name = {"CosineAnnealingLR": "T_max", "StepLR": "step_size", "CosineAnnealingWarmRestarts": "T_0"}.get(kind, "")
    horizon = getattr(scheduler, name, None) if name else None
    if kind in ("OneCycleLR", "PolynomialLR"):
        name = "total_steps" if kind == "OneCycleLR" else "total_iters"
        horizon = getattr(scheduler, name, None)
    if kind == "MultiStepLR":
        name, horizon = "last milestone", max(scheduler.milestones, default=None)
    if kind == "LambdaLR":
        name, horizon = _length_of_lambda(next(iter(getattr(scheduler, "lr_lambdas", [])), None))
    return kind, name, horizon


def _length_of_lambda(function: Any) -> tuple[str, int | None]:
    """(name, value) of the length in a lambda schedule: an argument bound by functools.partial, as in transformers'
    schedules, or a variable of the enclosing function."""
    bound = dict(getattr(function, "keywords", None) or {})
    code = getattr(function, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(function, "__closure__", None) or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            bound[name] = cell.cell_contents
    lengths = {name: value for name, value in bound.items() if type(value) is int and _LENGTH.search(name)}
    return max(lengths.items(), key=lambda pair: pair[1], default=("", None))


def install(log: EventLog) -> None:
    recorder, patches = _StepRecorder(log), log.patches
    patches.around(torch.autograd, "backward", recorder.around_backward)
    patches.after(Optimizer, "__init__", recorder.after_optimizer_init)
    patches.after(Optimizer, "load_state_dict", recorder.after_load_state_dict)
    patches.after(Optimizer, "zero_grad", recorder.after_zero_grad)
    patches.after(torch.nn.Module, "zero_grad", recorder.after_zero_grad)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    schedulers = [cls for cls in vars(torch.optim.lr_scheduler).values() if isinstance(cls, type)]
    for cls in schedulers:
        if issubclass(cls, (LRScheduler, ReduceLROnPlateau)):
            recorder.patch_scheduler(cls)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patches.around(clip_grad, name, recorder.around_clip)
        patches.wrap(clip_grad, name, _given_a_list)
        patches.replace(torch.nn.utils, name, getattr(clip_grad, name))
    patches.before(torch.amp.GradScaler, "scale", recorder.before_scale)
    patches.before(torch.amp.GradScaler, "update", recorder.before_update)
