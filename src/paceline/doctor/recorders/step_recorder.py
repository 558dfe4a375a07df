"""Backward passes, optimizer steps, schedulers, clipping and loss scaling."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.recorders.event_log import EventLog
from paceline.doctor.recorders.host_sync_recorder import machine_state
from paceline.doctor.recorders.loss_graph import loss_divisor, loss_kind, mean_sizes
from paceline.doctor.recorders.loss_terms import Term, loss_terms
from paceline.doctor.recorders.model_recorder import ModelRecorder
from paceline.doctor.recorders.patching import call_after, call_before, patch
from paceline.doctor.recorders.replica_recorder import ReplicaRecorder, parameters
from paceline.torch_private.observed import measured_by_ddp, parts_of_schedule, scale_of, unscaled

_LENGTH = re.compile(
    r"(total|train\w*|max|decay|num)_?(steps|iters?|iterations|updates)$|^(t_max|total|steps)$", re.IGNORECASE
)
_MAX_MAGNITUDES = 120  # sums over gradients, each of which waits for the device
_MAX_CLIPS = 50  # calls of clipping whose effect is measured
_MAX_COUNTED = 400  # backward passes, or calls of zero_grad, that are looked into
_MAX_SHARDS, _SHARD_TOLERANCE = 24, 1e-4  # sharded gradients of an optimizer; by how much their factors may differ


class StepLimitReached(SystemExit):
    """Ends the script: the optimizer steps that were asked for have been made."""


class _StepRecorder:
    """The state of training in this process. Optimizers and schedulers are numbered as they are constructed."""

    def __init__(self, log: EventLog, models: ModelRecorder) -> None:
        self.log, self.models = log, models
        self._optimizer_count = 0
        self._scheduler_count = 0
        self._scheduler_depth = 0  # calls of a scheduler's step under way: a scheduler may step others
        self._steps: dict[int, int] = {}  # optimizer -> steps made
        self.replicas = ReplicaRecorder(log, models)
        self._backward_count = 0
        self._owner: Any = WeakIdKeyDictionary()  # parameter -> id(optimizer)
        self._scalers: list[Any] = []
        self._magnitude: float | None = None  # of the gradients, after the last backward
        self._ratio_at_clip: float | None = None  # the magnitude at the first clipping since, by that
        self._magnitude_count = 0
        # optimizer -> numbers of the backward passes whose gradients its parameters hold
        self._holds: dict[int | None, list[int]] = {}
        self._drop_count = self._clip_count = 0
        self._shards: dict[int, list[float]] = {}  # optimizer -> the magnitudes of its sharded gradients then
        self._had_gradient: set[int] = set()  # id of each parameter with a gradient since its optimizer's last step

    # --- backward

    def wrap_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **options: Any) -> Any:
            log, models = self.log, self.models
            if torch.compiler.is_compiling() or not log.active:
                return original(tensors, *args, **options)
            synced, local = sorted(models.synced_forwards), sorted(models.unsynced_forwards - models.synced_forwards)
            models.synced_forwards.clear()
            models.unsynced_forwards.clear()
            mean = form = count = None
            terms: list[Term] = []
            means: list[list[float]] = []
            with log.overhead():
                root = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if len(tensors) == 1 else None
                plain = (args[0] if args else options.get("grad_tensors")) is None
                mean = form = "other"
                if root is not None and root.numel() == 1 and plain:
                    mean = form = loss_kind(root)
                    few = self._backward_count < _MAX_COUNTED
                    count, terms = (loss_divisor(root), loss_terms(root)) if few else (None, [])
                    means = mean_sizes(root) if few else []
                self._find_dropped(log.optimizers, [])
                if any(models.has_script_hook(p) for o in log.optimizers for p in parameters(o)):
                    mean = "other"  # which may divide the gradients
                log.collectives.invalidate(backward=True)
            end = log.collectives.begin("DDP's gradients", None) if synced else None
            try:
                result = original(tensors, *args, **options)
            except RuntimeError as error:
                log.record("refused", op="DDP's gradients" if synced else "backward", text=str(error)[:400])
                raise
            finally:
                if end is not None:
                    end()
                log.collectives.invalidate()
                log.backward_since_step = True
            self._backward_count += 1
            log.variables.pass_ended = False
            with log.overhead():
                self.replicas.after_backward(log.optimizers, lambda number: self._steps.get(number, 0))
                self._magnitude, self._ratio_at_clip = self._gradient_magnitude(), None
                self._had_gradient |= {id(p) for o in log.optimizers for p in parameters(o) if p.grad is not None}
                for o in log.optimizers:
                    if any(p.grad is not None for p in parameters(o)):
                        self._holds.setdefault(o.__dict__["_paceline_doctor"], []).append(self._backward_count)
                self._shards = {o.__dict__["_paceline_doctor"]: self._shard_magnitudes(o) for o in log.optimizers}
            models.has_reduced.update(synced)
            reached = {number: models.pop_reached(number) for number in synced}
            log.record(
                "backward",
                synced=synced,
                local=local,
                mean=mean,
                form=form,
                count=count,
                means=means,
                terms=terms,
                **log.draws.take(models.rows),
                unsent=models.sync_off,
                reached=reached,
                library=self.log.called_by_library(),
            )
            return result

        return backward

    def _shard_magnitudes(self, optimizer: Any) -> list[float]:
        """The magnitudes of this process's shards of some sharded gradients."""
        some = [p.grad for p in parameters(optimizer) if hasattr(p.grad, "to_local")][:_MAX_SHARDS]
        few = self._backward_count <= _MAX_COUNTED
        return [float(g.to_local().detach().abs().sum()) for g in some] if few else []

    def _shard_factor(self, optimizer: Any) -> float | None:
        """The number by which these shards have been multiplied since the backward; None: not one number."""
        before, now = self._shards.get(optimizer.__dict__["_paceline_doctor"], []), self._shard_magnitudes(optimizer)
        pairs = [(b, n) for b, n in zip(before, now) if b > 0]
        if not pairs or len(before) != len(now):
            return None
        factors = [n / b for b, n in pairs]
        return factors[0] if max(factors) - min(factors) <= _SHARD_TOLERANCE * max(factors) else None

    def after_zero_grad(self, thing: Any, /, *_: Any, **__: Any) -> None:
        """Of an optimizer or a module."""
        self._find_dropped([thing] if isinstance(thing, Optimizer) else self.log.optimizers, None)

    def _find_dropped(self, optimizers: Iterable[Any], at: list[Any] | None) -> None:
        """Record the backward passes whose gradients have gone before a step used them.

        at: [] where no line is known; None: the line that makes the current call.
        """
        for o in optimizers:
            number = getattr(o, "_paceline_doctor", None)  # Lightning's wrapper asks the optimizer inside
            held = self._holds.get(number)
            if not held or self._drop_count >= _MAX_COUNTED or any(_is_there(p.grad) for p in parameters(o)):
                continue
            self._drop_count += 1
            self.log.record("dropped", at=at, opt=number, passes=list(held))
            held.clear()

    def _gradient_magnitude(self) -> float:
        """The magnitude of some gradients; 0.0 once it has been computed often enough."""
        self._magnitude_count += 1
        if self._magnitude_count > _MAX_MAGNITUDES:
            return 0.0
        some = [p.grad for o in self.log.optimizers for p in list(parameters(o))[:4] if p.grad is not None]
        return sum(float(g.detach().abs().sum()) for g in some if g.layout is torch.strided)

    def _rescaled(self) -> bool:
        """Has the script divided its gradients since the last backward? Unscaling and clipping do not count."""
        share = self._ratio_at_clip if self._ratio_at_clip is not None else self._gradient_ratio()
        return share is not None and share < 0.75

    def _gradient_ratio(self, scaled: bool = False) -> float | None:
        """The magnitude of the gradients now, by that after the last backward.

        scaled: the loss scale is in both of them.
        """
        if not self._magnitude or self._magnitude_count >= _MAX_MAGNITUDES:
            return None
        factor = 1.0 if scaled else self._loss_scale()
        return self._gradient_magnitude() * factor / self._magnitude

    def _loss_scale(self) -> float:
        """The loss scale that the gradients of the last backward were multiplied by."""
        used = (s for s in self._scalers if getattr(s, "_paceline_doctor_scaled", False))
        return next((scale for s in used if (scale := scale_of(s)) is not None), 1.0)

    # --- optimizers

    def after_optimizer_init(self, optimizer: Any, /, *_: Any, **__: Any) -> None:
        number = optimizer.__dict__["_paceline_doctor"] = self._optimizer_count
        self._optimizer_count += 1
        self.log.optimizers.add(optimizer)
        self.models.add_trained(list(parameters(optimizer)))
        self._owner.update({p: id(optimizer) for p in parameters(optimizer)})
        lrs = [_as_float(group.get("lr")) for group in optimizer.param_groups]
        self.log.record("optimizer", opt=number, lr=lrs)

    def before_step(self, optimizer: Any, args: Any, options: Any) -> None:
        log = self.log
        number = optimizer.__dict__.get("_paceline_doctor")
        if number is None or not log.active:
            return
        made = self._steps.get(number, 0)
        if log.steps is not None and made >= log.steps:
            raise StepLimitReached(0)
        with log.overhead():
            mine = [p for p in parameters(optimizer) if p.requires_grad]
            without = []
            if any(self._lacks_gradient(p) for p in mine):
                without = [
                    name for name, p in self.replicas.named(optimizer) if p.requires_grad and self._lacks_gradient(p)
                ]
            lrs = [_as_float(group.get("lr")) for group in optimizer.param_groups]
            rescaled = self._rescaled()
            alike = self.replicas.before_step(optimizer, number, made)
            log.record(
                "before", opt=number, step=made, lr=lrs, without=without, parameters=len(mine), rescaled=rescaled,
                backwards=self._backward_count, scale=self._loss_scale(), logged=self._ddp_comm_seconds(),
                unwaited=log.collectives.pop_unwaited(), shrunk=self._shard_factor(optimizer),
                uses=list(self._holds.get(number, [])), **alike,
            )  # fmt: skip

    def _lacks_gradient(self, parameter: torch.Tensor) -> bool:
        """Has the parameter no gradient, or zeros that the script put there since the backward?"""
        grad = parameter.grad
        return grad is None or bool(self._had_gradient and id(parameter) not in self._had_gradient and not grad.any())

    def after_step(self, optimizer: Any, args: Any, options: Any) -> None:
        number = optimizer.__dict__.get("_paceline_doctor")
        if number is None or not self.log.active:
            return
        made = self._steps[number] = self._steps.get(number, 0) + 1
        self.log.clipped_gradients, self.log.backward_since_step = set(), False
        self.log.draws.clear()
        self._holds.pop(number, None)
        self._had_gradient -= {id(p) for p in parameters(optimizer)}
        self.log.collectives.invalidate()
        with self.log.overhead():
            alike = self.replicas.after_step(optimizer, number, made)
            state = machine_state() if self.replicas.is_compared(made) else None
            rescaled = self._rescaled()  # by a hook of the optimizer's, or in its own step
            self._magnitude = self._ratio_at_clip = None
            self.log.record("step", now=True, opt=number, step=made, machine=state, rescaled=rescaled, **alike)

    def _ddp_comm_seconds(self) -> dict[int, float]:
        """DDP module -> the seconds of communication that DDP itself has measured, which it does in some iterations."""
        found = {}
        for module in list(self.models.ddp_modules):
            try:
                figures = measured_by_ddp(module)
                found[module.__dict__["_paceline_doctor"]] = figures.get("avg_backward_comm_time", 0) / 1e9
            except Exception:  # a private call
                continue
        return found

    def after_load_state_dict(self, optimizer: Any, /, *_: Any, **__: Any) -> None:
        self.log.record("restored", opt=optimizer.__dict__.get("_paceline_doctor"))

    def after_scheduler_load(self, scheduler: Any, /, *_: Any, **__: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        self.log.record("restored", opt=getattr(optimizer, "__dict__", {}).get("_paceline_doctor"))

    # --- schedulers

    def patch_scheduler(self, cls: Any) -> None:
        """Patch a class of schedulers: its constructor, and its own step if it has one."""

        def make_init(original: Any) -> Any:
            def __init__(scheduler: Any, /, *args: Any, **options: Any) -> None:
                first = "_paceline_doctor" not in scheduler.__dict__
                if first:
                    scheduler.__dict__["_paceline_doctor"] = self._scheduler_count
                    self._scheduler_count += 1
                self._scheduler_depth += 1
                try:
                    original(scheduler, *args, **options)
                finally:
                    self._scheduler_depth -= 1
                if first and not self._scheduler_depth:
                    self.log.record("sched_made", sched=scheduler.__dict__["_paceline_doctor"])

            return __init__

        def make_step(original: Any) -> Any:
            def step(scheduler: Any, /, *args: Any, **options: Any) -> Any:
                if self._scheduler_depth or not self.log.active:
                    return original(scheduler, *args, **options)
                optimizer = getattr(scheduler, "optimizer", None)
                self._scheduler_depth += 1
                try:
                    result = original(scheduler, *args, **options)
                except Exception as error:
                    self.log.record(
                        "sched_error", at=self.log.caller(), text=str(error), **_describe_scheduler(scheduler)
                    )
                    raise
                finally:
                    self._scheduler_depth -= 1
                lrs = [_as_float(group.get("lr")) for group in optimizer.param_groups] if optimizer is not None else []
                opt = optimizer.__dict__.get("_paceline_doctor") if optimizer is not None else None
                self.log.record(
                    "sched", opt=opt, lr=lrs, library=self.log.called_by_library(), **_describe_scheduler(scheduler)
                )
                return result

            return step

        if "__init__" in vars(cls):
            patch(cls, "__init__", make_init)
        if "load_state_dict" in vars(cls):
            call_after(self.log, cls, "load_state_dict", self.after_scheduler_load)
        if "step" in vars(cls):
            patch(cls, "step", make_step)

    # --- clipping and scaling

    def wrap_clip(self, original: Any) -> Any:
        def clip_(parameters: Any, *args: Any, **options: Any) -> Any:
            if not self.log.active:
                return original(parameters, *args, **options)
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            scale, grads, before = None, [], []
            with self.log.overhead():
                scale = self._scale_in(parameters)
                self._ratio_at_clip = (
                    self._gradient_ratio(scale is not None) if self._ratio_at_clip is None else self._ratio_at_clip
                )
                grads = [p.grad for p in parameters if p.grad is not None]
                self._clip_count += 1
                before = [float(g.detach().abs().sum()) for g in grads[:64]] if self._clip_count <= _MAX_CLIPS else []
            result = original(parameters, *args, **options)
            changed = False
            with self.log.overhead():
                after = [float(g.detach().abs().sum()) for g in grads[:64]] if before else []
                changed = any(a < b * (1 - 1e-3) for a, b in zip(after, before))
                norm = float(result) if isinstance(result, torch.Tensor) and before else None
                bound = _as_float(args[0] if args else next(iter(options.values()), None))
                self.log.record("clip", scale=scale, norm=norm, bound=bound, changed=changed)
            self.log.clipped_gradients = {id(g) for g in grads} if changed else set()
            return result

        return clip_

    def _scale_in(self, parameters: list[torch.Tensor]) -> float | None:
        """The loss scale that is in these gradients; None where none is."""
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


def _is_there(grad: torch.Tensor | None) -> bool:
    """Is it a gradient, and not zeros? Of a sharded one this process's shard counts: nothing is communicated."""
    if grad is None or grad.layout is not torch.strided:
        return grad is not None
    own = grad.to_local() if hasattr(grad, "to_local") else grad
    return bool(own.detach().any())


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """The fields by which a scheduler's events describe it. horizon: its length in its own steps, where it has one."""
    kind, name, horizon = _schedule_length(scheduler)
    base = _as_float(next(iter(getattr(scheduler, "base_lrs", [])), None))
    number, count = scheduler.__dict__.get("_paceline_doctor"), getattr(scheduler, "last_epoch", None)
    return {"sched": number, "type": kind, "horizon": horizon, "name": name, "base": base, "count": count}


def _schedule_length(scheduler: Any) -> tuple[str, str, int | None]:
    """(class, name of the length, length) of a scheduler; of a SequentialLR all its parts together."""
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
    """(name, value) of the length that a function of the step was given: an argument bound by functools.partial, as
    transformers' schedules have it, or a variable of the function around it."""
    bound = dict(getattr(function, "keywords", None) or {})
    code = getattr(function, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(function, "__closure__", None) or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            bound[name] = cell.cell_contents
    lengths = {name: value for name, value in bound.items() if type(value) is int and _LENGTH.search(name)}
    return max(lengths.items(), key=lambda pair: pair[1], default=("", None))


def install(log: EventLog) -> None:
    recorder = _StepRecorder(log, log.models)
    patch(torch.autograd, "backward", recorder.wrap_backward)
    call_after(log, Optimizer, "__init__", recorder.after_optimizer_init)
    call_after(log, Optimizer, "load_state_dict", recorder.after_load_state_dict)
    call_after(log, Optimizer, "zero_grad", recorder.after_zero_grad)
    call_after(log, torch.nn.Module, "zero_grad", recorder.after_zero_grad)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    schedulers = [cls for cls in vars(torch.optim.lr_scheduler).values() if isinstance(cls, type)]
    for cls in schedulers:
        if issubclass(cls, (LRScheduler, ReduceLROnPlateau)):
            recorder.patch_scheduler(cls)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patch(clip_grad, name, recorder.wrap_clip)
        setattr(torch.nn.utils, name, getattr(clip_grad, name))
    call_before(log, torch.amp.GradScaler, "scale", recorder.before_scale)
    call_before(log, torch.amp.GradScaler, "update", recorder.before_update)
