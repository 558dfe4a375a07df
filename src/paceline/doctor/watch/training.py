"""Backward passes, optimizers, schedulers, clipping and loss scaling; digests of the weights at some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from paceline.doctor.watch.losses import counted, divided
from paceline.doctor.watch.models import Models
from paceline.doctor.watch.notebook import Notebook, put
from paceline.doctor.watch.replicas import Replicas, parameters
from paceline.doctor.watch.waiting import machine
from paceline.torch_private.observed import measured_by_ddp, parts_of_schedule, scale_of, unscaled

_MOST_MAGNITUDES = 120
_MOST_COUNTED = 400  # backward passes
_MOST_PARTS, _ALIKE = 24, 1e-4  # gradients that are cut over processes; of what multiplies them


class Enough(SystemExit):
    """The steps that were asked for have been made."""


class _Training:
    def __init__(self, book: Notebook, models: Models) -> None:
        self.book, self.models = book, models
        self._optimizers = 0
        self._schedulers = 0
        self._inside = 0  # a scheduler that steps others
        self._steps: dict[int, int] = {}  # optimizer -> steps made
        self.replicas = Replicas(book, models)
        self._backwards = 0
        self._owner: Any = WeakIdKeyDictionary()  # parameter -> id(optimizer)
        self._scalers: list[Any] = []
        self._gradient: float | None = None  # its magnitude after the last backward
        self._share: float | None = None  # of that, what there was when it was clipped
        self._magnitudes = 0
        self._unsent = False  # was the last backward one under no_sync, and no step since?
        self._dropped = 0
        self._norms: dict[int, list[float]] = {}  # optimizer -> magnitudes of its parts of gradients, after a backward
        self._had: set[int] = set()  # id of each parameter that had a gradient after a backward, since its step

    # --- backward

    def backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **options: Any) -> Any:
            book, models = self.book, self.models
            if torch.compiler.is_compiling() or not book.watching:
                return original(tensors, *args, **options)
            synced, local = sorted(models.pending), sorted(models.local - models.pending)
            models.pending.clear()
            models.local.clear()
            mean = form = count = None
            with book.aside():
                root = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if len(tensors) == 1 else None
                plain = (args[0] if args else options.get("grad_tensors")) is None
                mean = form = "other"
                if root is not None and root.numel() == 1 and plain:
                    mean = form = divided(root)
                    count = counted(root) if self._backwards < _MOST_COUNTED else None
                if any(models.hooked(p) for o in book.optimizers for p in parameters(o)):
                    mean = "other"  # which may divide the gradients
                book.collectives.stale(backward=True)
            end = book.collectives.begin("DDP's gradients", None) if synced else None
            began = book.clock()
            try:
                result = original(tensors, *args, **options)
            except RuntimeError as error:
                book.note("refused", op="DDP's gradients" if synced else "backward", text=str(error)[:400])
                raise
            finally:
                if end is not None:
                    end()
                book.collectives.stale()
                book.fresh = True
            seconds = book.clock() - began
            self._backwards += 1
            with book.aside():
                self.replicas.backward(book.optimizers, lambda number: self._steps.get(number, 0))
                self._gradient, self._share = self._magnitude(), None
                self._had |= {id(p) for o in book.optimizers for p in parameters(o) if p.grad is not None}
                self._unsent = bool(local and not synced) or models.unsent_gradients
                self._norms = {o.__dict__["_paceline_doctor"]: self._parts(o) for o in book.optimizers}
            models.reduced.update(synced)
            reached = {number: models.reached(number) for number in synced}
            book.note(
                "backward",
                synced=synced,
                local=local,
                mean=mean,
                form=form,
                count=count,
                unsent=models.unsent_gradients,
                seconds=seconds,
                reached=reached,
                library=self.book.library(),
            )
            return result

        return backward

    def _parts(self, optimizer: Any) -> list[float]:
        """The magnitudes of this process's parts of some gradients that are cut over processes."""
        some = [p.grad for p in parameters(optimizer) if hasattr(p.grad, "to_local")][:_MOST_PARTS]
        few = self._backwards <= _MOST_COUNTED
        return [float(g.to_local().detach().abs().sum()) for g in some] if few else []

    def _shrunk(self, optimizer: Any) -> float | None:
        """By what all of these have been multiplied since the backward, if it is one number."""
        before, now = self._norms.get(optimizer.__dict__["_paceline_doctor"]), self._parts(optimizer)
        pairs = [(b, n) for b, n in zip(before or [], now) if b > 0]
        if not pairs or len(before or []) != len(now):
            return None
        factors = [n / b for b, n in pairs]
        return factors[0] if max(factors) - min(factors) <= _ALIKE * max(factors) else None

    def dropped(self, original: Any) -> Any:
        """zero_grad, between a backward under no_sync and the step that it is made for."""

        def zero_grad(thing: Any, /, *args: Any, **options: Any) -> Any:
            if self._unsent and self.book.watching and self._dropped < _MOST_COUNTED:
                with self.book.aside():
                    mine = thing.parameters() if isinstance(thing, torch.nn.Module) else parameters(thing)
                    if any(p.grad is not None for p in mine):
                        self._dropped += 1
                        self.book.note("dropped", backwards=self._backwards)
            return original(thing, *args, **options)

        return zero_grad

    def _magnitude(self) -> float:
        """Of some gradients, at the first backward passes: were they divided before the step?"""
        self._magnitudes += 1
        if self._magnitudes > _MOST_MAGNITUDES:
            return 0.0
        some = [p.grad for o in self.book.optimizers for p in list(parameters(o))[:4] if p.grad is not None]
        return sum(float(g.detach().abs().sum()) for g in some if g.layout is torch.strided)

    def _rescaled(self) -> bool:
        """Has the script divided its gradients since the last backward? (A loss scale is no such division, and neither
        is clipping.)"""
        share = self._share if self._share is not None else self._remaining()
        return share is not None and share < 0.75

    def _remaining(self, scaled: bool = False) -> float | None:
        """The magnitude of the gradients now, of that after the last backward. scaled: the loss scale is in them."""
        if not self._gradient or self._magnitudes >= _MOST_MAGNITUDES:
            return None
        factor = 1.0 if scaled else self._loss_scale()
        return self._magnitude() * factor / self._gradient

    def _loss_scale(self) -> float:
        """What the gradients of the last backward were multiplied by."""
        used = (s for s in self._scalers if getattr(s, "_paceline_doctor_scaled", False))
        return next((scale for s in used if (scale := scale_of(s)) is not None), 1.0)

    # --- optimizers

    def optimizer(self, original: Any) -> Any:
        def __init__(optimizer: Any, /, *args: Any, **options: Any) -> None:
            original(optimizer, *args, **options)
            with self.book.aside():
                number = optimizer.__dict__["_paceline_doctor"] = self._optimizers
                self._optimizers += 1
                self.book.optimizers.add(optimizer)
                self.models.trained(list(parameters(optimizer)))
                self._owner.update({p: id(optimizer) for p in parameters(optimizer)})
                lrs = [_number(group.get("lr")) for group in optimizer.param_groups]
                self.book.note("optimizer", opt=number, type=type(optimizer).__name__, lr=lrs)

        return __init__

    def before(self, optimizer: Any, args: Any, options: Any) -> None:
        book = self.book
        number = optimizer.__dict__.get("_paceline_doctor")
        if number is None or not book.watching:
            return
        made = self._steps.get(number, 0)
        if book.steps is not None and made >= book.steps:
            book.note("enough", steps=made)
            raise Enough(0)
        with book.aside():
            mine = [p for p in parameters(optimizer) if p.requires_grad]
            without = []
            if any(self._lacks(p) for p in mine):
                without = [name for name, p in self.replicas.named(optimizer) if p.requires_grad and self._lacks(p)]
            lrs = [_number(group.get("lr")) for group in optimizer.param_groups]
            rescaled = self._rescaled()
            alike = self.replicas.before(optimizer, number, made)
            book.note(
                "before", opt=number, step=made, lr=lrs, without=without, parameters=len(mine), rescaled=rescaled,
                backwards=self._backwards, scale=self._loss_scale(), logged=self._logged(),
                unwaited=book.collectives.left(), shrunk=self._shrunk(optimizer), **alike,
            )  # fmt: skip

    def _lacks(self, parameter: torch.Tensor) -> bool:
        """Has it no gradient, or zeros that the script put there since the backward?"""
        grad = parameter.grad
        return grad is None or bool(self._had and id(parameter) not in self._had and not grad.any())

    def after(self, optimizer: Any, args: Any, options: Any) -> None:
        number = optimizer.__dict__.get("_paceline_doctor")
        if number is None or not self.book.watching:
            return
        made = self._steps[number] = self._steps.get(number, 0) + 1
        self.book.clipped, self.book.fresh, self._unsent = set(), False, False
        self._had -= {id(p) for p in parameters(optimizer)}
        self.book.collectives.stale()
        with self.book.aside():
            alike = self.replicas.after(optimizer, number, made)
            state = machine() if self.replicas.looked(made) else None
            rescaled = self._rescaled()  # by a hook of the optimizer's, or in its own step
            self._gradient = self._share = None
            self.book.note("step", now=True, opt=number, step=made, machine=state, rescaled=rescaled, **alike)

    def _logged(self) -> dict[int, float]:
        """DDP's own measurement of its communication, seconds, where it has made one (some iterations only)."""
        found = {}
        for module in list(self.models.alive):
            try:
                figures = measured_by_ddp(module)
                found[module.__dict__["_paceline_doctor"]] = figures.get("avg_backward_comm_time", 0) / 1e9
            except Exception:  # a private call
                continue
        return found

    def restored(self, original: Any) -> Any:
        def load_state_dict(optimizer: Any, /, *args: Any, **options: Any) -> Any:
            result = original(optimizer, *args, **options)
            self.book.note("restored", opt=optimizer.__dict__.get("_paceline_doctor"))
            return result

        return load_state_dict

    # --- schedulers

    def schedule(self, cls: Any) -> None:
        """Watch a class of schedulers, and its own step if it has one."""

        def make_init(original: Any) -> Any:
            def __init__(scheduler: Any, /, *args: Any, **options: Any) -> None:
                first = "_paceline_doctor" not in scheduler.__dict__
                if first:
                    scheduler.__dict__["_paceline_doctor"] = self._schedulers
                    self._schedulers += 1
                self._inside += 1
                try:
                    original(scheduler, *args, **options)
                finally:
                    self._inside -= 1
                if first and not self._inside:
                    self.book.note("sched_made", sched=scheduler.__dict__["_paceline_doctor"])

            return __init__

        def make_step(original: Any) -> Any:
            def step(scheduler: Any, /, *args: Any, **options: Any) -> Any:
                if self._inside or not self.book.watching:
                    return original(scheduler, *args, **options)
                optimizer = getattr(scheduler, "optimizer", None)
                self._inside += 1
                try:
                    result = original(scheduler, *args, **options)
                except Exception as error:
                    self.book.note("sched_error", at=self.book.at(), text=str(error), **_schedule(scheduler))
                    raise
                finally:
                    self._inside -= 1
                lrs = [_number(group.get("lr")) for group in optimizer.param_groups] if optimizer is not None else []
                opt = optimizer.__dict__.get("_paceline_doctor") if optimizer is not None else None
                self.book.note("sched", opt=opt, lr=lrs, library=self.book.library(), **_schedule(scheduler))
                return result

            return step

        if "__init__" in vars(cls):
            put(cls, "__init__", make_init)
        if "step" in vars(cls):
            put(cls, "step", make_step)

    # --- clipping and scaling

    def clip(self, original: Any) -> Any:
        def clip_(parameters: Any, *args: Any, **options: Any) -> Any:
            if not self.book.watching:
                return original(parameters, *args, **options)
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            scale, grads, before = None, [], []
            with self.book.aside():
                scale = self._scaled(parameters)
                self._share = self._remaining(scale is not None) if self._share is None else self._share
                grads = [p.grad for p in parameters if p.grad is not None]
                before = [float(g.detach().abs().sum()) for g in grads[:64]] if self._few("clip") else []
            result = original(parameters, *args, **options)
            changed = False
            with self.book.aside():
                after = [float(g.detach().abs().sum()) for g in grads[:64]] if before else []
                changed = any(a < b * (1 - 1e-3) for a, b in zip(after, before))
                norm = float(result) if isinstance(result, torch.Tensor) and before else None
                bound = _number(args[0] if args else next(iter(options.values()), None))
                self.book.note("clip", scale=scale, norm=norm, bound=bound, changed=changed)
            self.book.clipped = {id(g) for g in grads} if changed else set()
            return result

        return clip_

    def _few(self, what: str) -> bool:
        counts = self.__dict__.setdefault("_counts", {})
        counts[what] = counts.get(what, 0) + 1
        return bool(counts[what] <= 50)

    def _scaled(self, parameters: list[torch.Tensor]) -> float | None:
        """The loss scale that is still in these gradients, if one is."""
        owners = {self._owner.get(p) for p in parameters}
        for scaler in self._scalers:
            scale = scale_of(scaler)
            if scale is not None and getattr(scaler, "_paceline_doctor_scaled", False) and not unscaled(scaler, owners):
                return scale
        return None

    def scale(self, original: Any) -> Any:
        def scale(scaler: Any, /, *args: Any, **options: Any) -> Any:
            if all(scaler is not known for known in self._scalers):
                self._scalers.append(scaler)
            scaler._paceline_doctor_scaled = True
            return original(scaler, *args, **options)

        return scale

    def update(self, original: Any) -> Any:
        def update(scaler: Any, /, *args: Any, **options: Any) -> Any:
            scaler._paceline_doctor_scaled = False
            return original(scaler, *args, **options)

        return update


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _schedule(scheduler: Any) -> dict[str, Any]:
    """What a scheduler says of itself; horizon: the length that it counts in its own steps, where it has one."""
    kind, name, horizon = _horizon(scheduler)
    base = _number(next(iter(getattr(scheduler, "base_lrs", [])), None))
    number, count = scheduler.__dict__.get("_paceline_doctor"), getattr(scheduler, "last_epoch", None)
    return {"sched": number, "type": kind, "horizon": horizon, "name": name, "base": base, "count": count}


def _horizon(scheduler: Any) -> tuple[str, str, int | None]:
    """(class, what it calls its length, the length). Of a sequence: its last part's, after the others'."""
    kind = type(scheduler).__name__
    parts, start = parts_of_schedule(scheduler)
    if kind == "SequentialLR" and parts:
        kind, name, horizon = _horizon(parts[-1])
        return kind, f"sequence's end ({start} + {name})", None if horizon is None else start + horizon
    name = {"CosineAnnealingLR": "T_max", "StepLR": "step_size", "CosineAnnealingWarmRestarts": "T_0"}.get(kind, "")
    horizon = getattr(scheduler, name, None) if name else None
    if kind in ("OneCycleLR", "PolynomialLR"):
        name = "total_steps" if kind == "OneCycleLR" else "total_iters"
        horizon = getattr(scheduler, name, None)
    if kind == "MultiStepLR":
        name, horizon = "last milestone", max(scheduler.milestones, default=None)
    return kind, name, horizon


def watch(book: Notebook) -> None:
    training = _Training(book, book.models)
    put(torch.autograd, "backward", training.backward)
    put(Optimizer, "__init__", training.optimizer)
    put(Optimizer, "load_state_dict", training.restored)
    put(Optimizer, "zero_grad", training.dropped)
    put(torch.nn.Module, "zero_grad", training.dropped)
    register_optimizer_step_pre_hook(training.before)
    register_optimizer_step_post_hook(training.after)
    schedulers = [cls for cls in vars(torch.optim.lr_scheduler).values() if isinstance(cls, type)]
    for cls in schedulers:
        if issubclass(cls, (LRScheduler, ReduceLROnPlateau)):
            training.schedule(cls)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        put(clip_grad, name, training.clip)
        setattr(torch.nn.utils, name, getattr(clip_grad, name))
    put(torch.amp.GradScaler, "scale", training.scale)
    put(torch.amp.GradScaler, "update", training.update)
