"""A run that is one side of `paceline verify`: what each step computes is kept, and each starts from a given state.

Like the Probe it takes the place of some of a run's methods. A step is one global batch, from the first yield of a
training loader to the last update that acts on it.

1. When a step begins, the run in question (`leads`) writes its whole state. The others take it over, and so make the
   same step anew; of an optimizer's options, such as the learning rate, a side of whole batches keeps its own.
2. Before each update the gradients are kept. Sides of one process then take over those of the run in question, so that
   what an update makes of a gradient is compared apart from the gradient.
3. After it weights and buffers are.

An optimizer that is given a closure has its first evaluation's gradients kept. Where none is prepared, they are kept
after each backward of a last micro-batch, and the step ends when the script has cleared them.

Replicas that train apart (`layout.local`) have no state between two steps that is the run's: only the first is taken
over, and the last one kept.

Each rank writes `rank-N.json`. Tensors are in safetensors files: `state-K`, and `start-K` of the models alone (before
step K); `own-K` (what a side had there before it took over, of what was changed since the last update); `grad-K-U-rN`
(before update U of step K), and `take-K-U-rN`, the same of the run in question; `after-K-U` (weights and buffers after
it); `part-K-M` (gradients so far when yield M of the step begins, where one process computes all shards in turns);
`initial` and `end`. `state` and `take` hold tensors whole. Large ones of the others are sketches (sketches.py), since
they are compared and not taken over.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.comm import collectives, replicas, slices
from paceline.errors import ModelError, UsageError
from paceline.monitor.window import LOSS, Window
from paceline.run import Run
from paceline.train.loader import Loader
from paceline.train.loss import terms_of
from paceline.trial import kept, plain, watched
from paceline.trial.collated import Collated
from paceline.trial.lines import BACKWARD_HOOKS, Lines
from paceline.trial.order import Order
from paceline.trial.probe import TrialEnded
from paceline.trial.script import Asked, Place, place
from paceline.trial.sketches import sketched


class Recorder:
    """Attached to a run when it is made."""

    def __init__(self, run: Run, order: Order) -> None:
        assert order.records is not None
        self._run, self._order, self._folder = run, order, order.records
        self._world = run.world  # as it is, whatever the script is told
        self._steps: list[dict[str, Any]] = []
        self._now: dict[str, Any] | None = None
        self._window = Window(run.device)
        self._watch = watched.Watch(run, lambda: self._now)
        self._changing: set[str] = set()  # parameters with a hook that changes gradients
        self._collated: dict[Loader, Collated] = {}
        self._full = False  # the disk has no room for another step
        self._hooked = False  # whether the script has put a hook on a gradient
        self._leaves: list[Tensor] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._normalised = False  # a batch norm was training
        self._written = False
        self._evaluations = 0  # of the closure in this run.step, by an optimizer that is given one
        self._by_hand = 0  # steps that the script has made without an optimizer
        self._path = os.path.join(order.directory, f"rank-{run.world.rank}.json")
        if os.path.exists(self._path):  # of an earlier run of the script
            raise TrialEnded(0)
        layout = run._strategy.layout
        if order.turned:
            layout.mine = tuple((shard + 1) % layout.shards for shard in layout.mine)
        self._replicated = run._strategy.parts is None and not layout.together
        self._traced = self._replicated and not layout.opaque
        self._called: dict[nn.Module, str] = {}  # the layers whose calls are noted
        self._hook: Any = None
        run._stepper.losses = []
        own: dict[str, Callable[..., Any]] = {
            "prepare": self._prepare,
            "loader": self._loader,
            "_on_yield": self._on_yield,
            "_on_end": self._on_end,
            "forward_backward": self._forward_backward,
            "backward": self._backward,
            "step": self._step,
            **{name: self._watch.asking(getattr(run, name)) for name in ("gather", "sum", "mean", "ratio")},
            "save": lambda directory, **_: Path(directory) / f"step-{self._run.steps:08d}",
            "restore": lambda *_, **__: False,
            "export": lambda *_, **__: None,
            "add_tracker": lambda *_, **__: None,
            "close": self._close,
        }
        self._runs: dict[str, Callable[..., Any]] = {name: getattr(run, name) for name in own}
        for name, method in own.items():
            setattr(run, name, method)
        self._update_of, self._evaluated_of = run._stepper._update, run._stepper.evaluated
        run._stepper._update = self._update  # type: ignore[method-assign]
        run._stepper.evaluated = self._evaluated  # type: ignore[method-assign]
        self._patches = plain.Patches()
        self._plain = order.plain and run._noise is None  # noise by example is alike on all sides: it may stay
        if self._plain:
            plain.dropout_off(self._patches)
        self._lines: Lines | None = None
        if order.lines is not None:
            path = os.path.join(order.directory, f"lines-{run.world.rank}.json")
            self._lines = Lines(run, path, order.lines, self._addresses, self._patches)
        if order.told or order.lines is not None:
            Asked(run, order.told, self._asked, self._patches)
        if order.nudged:
            run._stepper.precision = plain.Scaled(run._stepper.precision, self._scales)  # type: ignore[assignment]
            for owner, name in BACKWARD_HOOKS:
                self._patches.put(owner, name, self._hooking(getattr(owner, name)))

    def _asked(self, at: Place) -> None:
        if self._lines is not None:
            self._lines.asked(at)

    def _addresses(self) -> dict[int, str]:
        """What lies where: parameters, buffers, their gradients, and what optimizers keep for them."""
        found: dict[int, str] = {}
        for number, model in enumerate(self._run._models):
            prefix = f"{number}/" if number else ""
            for name, buffer in model.named_buffers():
                found[_address(buffer)] = f"buffers:{prefix}{name}"
            for name, parameter in model.named_parameters():
                found[_address(parameter)] = f"weights:{prefix}{name}"
                if not self._run._strategy.closure_only and (grad := parameter.grad) is not None:
                    found.setdefault(_address(grad), f"gradient:{prefix}{name}")
        names = self._run._stepper.names
        for optimizer in self._run._optimizers:
            for own, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, Tensor) and own in names:
                        found.setdefault(_address(value), f"state:{names[own]}")
        found.pop(0, None)
        return found

    # --- in place of the run's methods

    def _prepare(self, *objects: Any) -> Any:
        if self._lines is not None:  # as it is called: what was written before has these addresses
            models = [thing for thing in objects if isinstance(thing, nn.Module)]
            self._lines.know(models, len(self._run._models))
        made = self._runs["prepare"](*objects)
        for number, model in enumerate(self._run._models):
            if self._plain:
                plain.recurrent_dropout_off(model)
            compiled = self._run.settings.compile  # whose graphs hooks would break
            self._normalised |= compiled and any(isinstance(module, _BatchNorm) for module in model.modules())
            for name, module in model.named_modules() if self._replicated and not compiled else ():
                if not list(module.children()):
                    self._called.setdefault(module, f"{number}/{name}" if number else name)
        if self._called and self._hook is None:
            self._hook = register_module_forward_pre_hook(self._calls)
        if self._lines is not None:
            self._lines.allow_options()
        return made

    def _hooking(self, original: Any) -> Any:
        """register_hook, of a tensor or a module's backward. A hook that Paceline or the recorder puts is none of the
        script's."""

        def register_hook(own: Any, *args: Any, **options: Any) -> Any:
            at, inside = place(recorded=True)
            self._hooked |= at is not None and not inside
            return original(own, *args, **options)

        return register_hook

    def _scales(self) -> bool:
        """Whether the loss is scaled in the backward: not where something else would see it, as a hook of the script's
        that bounds a gradient by its norm."""
        hooked = self._hooked or any(parameter._backward_hooks for parameter in self._run._stepper.names)
        seen = bool(self._leaves) or hooked
        if self._now is not None:
            self._now["scaled"] = not seen
        return not seen

    def _calls(self, module: nn.Module, *_: Any) -> None:
        """Of any module, and not hooked to a model: a script may save, pickle or copy that."""
        name = self._called.get(module)
        if name is None:
            return
        if self._now is not None and name not in self._now["modules"]:
            self._now["modules"].append(name)
        self._normalised |= isinstance(module, _BatchNorm) and module.training

    def _loader(self, dataset: Any, **options: Any) -> Loader:
        if not options.get("train", True):
            loader: Loader = self._runs["loader"](dataset, **options)
            return loader
        if self._order.whole:
            options["micro_batch"] = None
        if self._lines is not None:
            self._lines.loader(dataset, options)
        collated = Collated.of(options)
        loader = self._runs["loader"](dataset, **options)
        self._collated[loader] = collated
        loader.streams.backwards = self._order.backwards
        loader._source.probing = False  # the data of all ranks are compared afterwards, and a difference is a finding
        return loader

    def _on_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        turns = self._run._strategy.layout.turns
        if loader.train and request.micro == 0:
            self._look_for_updates_by_hand()
        if loader.train and request.micro == 0 and (self._now is None or self._now["updates"]):
            self._begin(request.epoch, request.step)
        elif loader.train and turns and request.micro:
            if self._world.size == 1:
                self._write(f"part-{len(self._steps)}-{request.micro}", self._gradients())
            for buffer, value in self._buffers if request.micro * turns % request.micros == 0 else ():
                buffer.copy_(value)  # as every process of several has them when it begins
        self._watch.asked = False
        self._runs["_on_yield"](loader)
        now = self._now
        if not loader.train or now is None:
            return
        now["yields"] += 1
        if self._lines is not None:
            self._lines.begin_yield(request.examples)
        parts, drew = self._collated[loader].take(request, self._order.backwards)
        now["drew"] |= drew
        for part, digests in parts:
            if part.indices:
                now["ids"].append([loader.name, part.shard, part.micro, list(part.indices)])
                now["data"].append([loader.name, part.shard, part.micro, digests])
        keys = [loader.streams.torch_key(request, part.shard, part.micro) for part in request.parts]
        self._watch.draws.mark(*(keys if self._run._strategy.layout.opaque else []))  # it seeds each piece anew

    def _on_end(self, loader: Loader, whole: bool) -> None:
        if loader.train and whole:
            self._look_for_updates_by_hand()
        self._runs["_on_end"](loader, whole)

    def _look_for_updates_by_hand(self) -> None:
        """The script may have updated the weights itself, and cleared the gradients, since its last backward."""
        now, found = self._now, 0 if self._run._optimizers else self._run._stepper.count_by_hand()
        if now is not None and found > self._by_hand:
            self._stepped(now)
        self._by_hand = found

    def _forward_backward(self, loss_fn: Callable[[Any, Any], Any], *args: Any, **options: Any) -> Tensor:
        def seen(model: Any, batch: Any) -> Any:
            draws = watched.Draws(self._run.device, self._run._noise)  # of this replica, which may be a thread's
            draws.mark()
            loss = loss_fn(model, batch)
            self._watch.drew(draws)
            if self._traced:
                self._trace([term.value for term in terms_of(loss)])
            if self._lines is not None:
                self._lines.begin_backward([term.value for term in terms_of(loss)])
            mine = self._run._strategy.layout.mine
            shard = replicas.current().rank if len(mine) > 1 else mine[0]
            return watched.silenced(loss) if self._silent(shard) else loss

        together = self._run._strategy.layout.together  # the closure does not run as a whole
        self._watch.begins_backward(self._gradients)
        made: Tensor = self._runs["forward_backward"](loss_fn if together else seen, *args, **options)
        if together:
            self._watch.drew()
        if self._lines is not None:
            self._lines.end_backward()
        self._watch.ends_backward(self._gradients if self._traced else dict)
        self._graded_by_hand()
        return made

    def _backward(self, loss: Tensor | None = None, **options: Any) -> None:
        roots = [root for root in (loss, options.get("total")) if isinstance(root, Tensor)]
        if self._traced:
            self._trace(roots)
        if self._silent(*self._run._strategy.layout.mine):
            loss = None if loss is None else watched.silenced(loss)
            options |= {"total": watched.silenced(options["total"])} if options.get("total") is not None else {}
        self._watch.begins_backward(self._gradients)
        if self._lines is not None:
            self._lines.begin_backward(roots)
        self._runs["backward"](loss, **options)
        if self._lines is not None:
            self._lines.end_backward()
        self._watch.drew()
        self._watch.ends_backward(self._gradients if self._traced else dict)
        self._graded_by_hand()

    def _graded_by_hand(self) -> None:
        """Without an optimizer, nobody says when the script uses the gradients: they are kept after each backward."""
        now, latest = self._now, self._run.latest
        if now is None or self._run._optimizers or self._run._strategy.layout.local:
            return
        if latest is not None and latest.current is not None and latest.current.final:
            self._keep_gradients(now)
            now["own"] = True

    def _silent(self, *shards: int) -> bool:
        order, now = self._order, self._now
        return order.only not in (None, *shards) and now is not None and now["updates"] == order.update

    def _trace(self, roots: Sequence[Tensor]) -> None:
        """Notes tensors with gradients that are in no model, and stay: an input is another one at each step."""
        names = self._run._stepper.names
        if self._now is None or slices.any_sharded(names):
            return
        found = plain.strangers(roots, names)
        stay = [leaf for leaf in found if any(leaf is other for other in self._leaves)]
        self._now["strangers"] |= {f"{i}, of shape {tuple(x.shape)}": plain.digest(x) for i, x in enumerate(stay)}
        self._leaves = found

    def _step(self, *args: Any, **options: Any) -> bool:
        acted: bool = self._runs["step"](*args, **options)
        self._evaluations = 0
        if acted and self._now is not None:
            self._stepped(self._now)
        return acted

    def _stepped(self, now: dict[str, Any]) -> None:
        """An update was made."""
        self._take_losses(now)
        if not self._run._strategy.layout.local:
            state = self._state()
            if self._world.rank == 0 and state is not None:
                self._write(f"after-{len(self._steps)}-{now['updates']}", kept.named(state["models"]))
        now["updates"] += 1
        now["after"] = self._digests()
        if self._lines is not None:
            self._lines.allow_options()  # a prepared scheduler has moved
        self._watch.asked = False
        self._watch.draws.mark()  # the update has seeded them anew

    def _take_losses(self, now: dict[str, Any]) -> None:
        losses = self._run._stepper.losses
        if losses:
            self._window.add_losses(losses)
            for call, value, count, request, _, _, term in losses:
                now["counted"] |= count is not None
                if request.examples and len(request.parts) == 1:
                    now["apart"].append([request.parts[0].shard, request.parts[0].micro, call, term, float(value)])
            losses.clear()

    def _update(self, optimizer: Any, graded: list[Tensor], max_grad_norm: float | None) -> bool:
        now = self._now
        if now is not None:
            self._keep_options(now, optimizer)
            if now["updates"]:
                now["between"] += [
                    name for name, made in self._digests().items() if now["after"].get(name, made) != made
                ]
            self._keep_gradients(now)
            if not self._order.leads and self._world.size == 1 and not self._apart():
                graded = self._take_gradients(optimizer, now["updates"])
        return self._update_of(optimizer, graded, max_grad_norm)

    def _evaluated(self, optimizer: Any) -> None:
        """An optimizer that is given a closure has evaluated it: first at the weights that the step started from. Later
        evaluations are at weights that follow from its own gradients, and so is the update."""
        self._evaluated_of(optimizer)
        now, self._evaluations = self._now, self._evaluations + 1
        if now is not None and self._evaluations == 1:
            self._keep_options(now, optimizer)
            self._keep_gradients(now)
            now["own"] = True

    def _keep_options(self, now: dict[str, Any], optimizer: Any) -> None:
        now["options"] += kept.options_of(optimizer)
        now["lrs"] += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

    def _keep_gradients(self, now: dict[str, Any]) -> None:
        """Those of the next update; in place of what was kept for it before."""
        gradients, update = self._gradients(), now["updates"]
        place = f"{len(self._steps)}-{update}"
        if self._replicated and self._world.size > 1:
            digests = {name: plain.digest(gradient) for name, gradient in gradients.items()}
            now["graded"] = [*now["graded"][:update], digests]
        if self._world.rank == 0 or not self._replicated:
            self._write(f"grad-{place}-r{self._world.rank}", gradients)
            if self._order.leads:
                self._write(f"take-{place}-r{self._world.rank}", gradients, whole=True)
        now["not_finite"] += [name for name, g in gradients.items() if not bool(g.isfinite().all())]

    def _take_gradients(self, optimizer: Any, update: int) -> list[Tensor]:
        """Those of the run in question in place of the own ones; where it keeps none, these."""
        found = kept.load_gradients(self._folder, len(self._steps), update)
        if not all(bool(gradient.isfinite().all()) for gradient in found.values()):
            found = {}  # no update was made of them
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters if found else ():
            given = found.get(self._run._stepper.names[p])
            p.grad = None if given is None else given.to(p.device, p.dtype if p.grad is None else p.grad.dtype)
        return [p for p in parameters if p.grad is not None]

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._finish()
        if self._hook is not None:
            self._hook.remove()
        self._patches.undo()
        self._runs["close"]()

    # --- steps

    def _begin(self, epoch: int, number: int) -> None:
        self._complete()
        layout, step = self._run._strategy.layout, len(self._steps)
        if layout.dealt:
            self._end()
        if step == self._order.steps:
            if layout.local or self._apart():
                self._keep_end()
            self._end()
        if self._replicated:
            watched.watch_hooks(self._run._stepper.names, self._changing)
        now = kept.fresh(epoch, number)
        now["start"] = self._digests()
        last = self._steps[-1]["after"] if self._steps else None
        now["outside"] = [name for name, made in now["start"].items() if last and last.get(name, made) != made]
        if not step or not (layout.local or self._apart()):
            state = self._state()
            if state is None:  # the ranks' weights differ; this step's record says which, and by whom they were changed
                self._steps.append(now)
                self._end()
            self._meet(state, now["outside"])
        if layout.turns:
            buffers = [buffer for model in self._run._models for buffer in model.buffers()]
            self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._window = Window(self._run.device)
        self._now = now
        if self._lines is not None:
            self._lines.begin_step(step)

    def _meet(self, state: dict[str, Any], outside: Sequence[str]) -> None:
        """The run in question leaves its state; the others take it over."""
        step, main = len(self._steps), self._world.rank == 0
        path = os.path.join(self._folder, f"state-{step}.safetensors")
        if self._order.leads:
            self._full = step > 1 and not collectives.broadcast_object(main and kept.room(state, self._folder))
            if self._full:
                self._end()
            if main:
                kept.save_state(state, path)
                self._write(f"start-{step}", kept.named(state["models"]))
                if self._run._strategy.layout.local:
                    Path(self._folder, "apart").touch()
            return
        own = kept.named(state["models"])
        if main and not step:
            self._write("initial", own)
        if main and outside:
            self._write(f"own-{step}", {name: own[name] for name in outside})
        if (given := kept.load_state(path)) is None:  # the run in question made no more steps
            self._end()
        if self._order.whole or self._order.told:
            kept.keep_options(state, given)
        if self._order.nudged:
            plain.nudge(given["models"], set(self._run._stepper.names.values()), seed=step)
        self._run._strategy.load_state_dict(given)
        if self._lines is not None:
            self._lines.allow_options()

    def _apart(self) -> bool:
        """Whether the run in question has replicas that train apart."""
        return not self._order.leads and os.path.exists(os.path.join(self._folder, "apart"))

    def _keep_end(self) -> None:
        state = self._state()
        if self._world.rank == 0 and state is not None:
            self._write("end", kept.named(state["models"]))

    def _end(self) -> NoReturn:
        self._finish()
        raise TrialEnded(0)

    def _state(self) -> dict[str, Any] | None:
        """None where a strategy refuses, on all ranks alike: their weights are not the same."""
        try:
            return self._run._strategy.state_dict()
        except ModelError:
            return None

    def _complete(self) -> None:
        now, self._now = self._now, None
        if now is None or not now["updates"]:
            return
        now["losses"] |= {key.removeprefix(LOSS): list(pair) for key, pair in self._window.totals().items()}
        self._steps.append(now)

    # --- what is kept

    def _gradients(self) -> dict[str, Tensor]:
        """By name, whole (collective where they are sharded)."""
        found = {}
        for parameter, name in self._run._stepper.names.items():
            grad = self._gradient(parameter)
            if grad is not None:
                found[name] = grad.full_tensor() if slices.is_sharded(grad) else grad  # type: ignore[attr-defined]
        return found

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        try:
            return parameter.grad
        except UsageError as error:
            raise UsageError(
                "paceline verify compares gradients, and this strategy has none to show. Verify the script with "
                "--strategy fsdp, which cuts the model in the same way; `paceline compare` compares losses under any."
            ) from error

    def _digests(self) -> dict[str, str]:
        """Of this rank's own weights and buffers, where it has them whole."""
        if not self._replicated:
            return {}
        values = kept.named([model.state_dict() for model in self._run._models])
        return {name: plain.digest(value) for name, value in values.items() if not slices.is_sharded(value)}

    def _write(self, name: str, tensors: Mapping[str, Tensor], whole: bool = False) -> None:
        """whole: others take them over. Else they are compared, for which sketches do."""
        kept.save(tensors if whole else sketched(tensors), os.path.join(self._order.directory, f"{name}.safetensors"))

    def _finish(self) -> None:
        if self._written:
            return
        self._written = True
        if self._lines is not None:
            self._lines.close()
        unfinished = self._now["modules"] if self._now is not None and not self._now["updates"] else []
        self._complete()
        record = {
            **kept.about(self._run, self._replicated),
            "rank": self._world.rank,
            "steps": self._steps,
            "unfinished": unfinished,
            "normalised": self._normalised,
            "hooked": sorted(self._changing),
            "ahead": self._run._stepper._ahead,
            "full": self._full,
        }
        with open(self._path + ".part", "w") as file:
            json.dump(record, file)
        os.replace(self._path + ".part", self._path)


def _address(tensor: Tensor) -> int:
    """0 where it has no memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
