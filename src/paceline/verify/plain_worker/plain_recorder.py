"""Record the updates of a script that does not use Paceline, and make each update start from a given state.

Each call of an optimizer's `step` is one update, and one step of the record. In the subject run, before and after each
update, the recorder writes the gradients, and the tensors that they change. In a run of one process:

1. A model is set to the subject run's first weights before its first forward.
2. Before an update the recorder saves the gradients. Then it loads the subject run's gradients, learning rate and other
   options. So the update is compared independently of the gradient.
3. After the update it loads the state of the subject run: weights, buffers, the optimizer's state.

If the script clips its gradients, the recorded gradients are those before clipping, and the norm is recorded too.

If each rank holds a part of some parameters, the other ranks write these parts into files with -rN at the end.

Files (see worker/recorder.py for the format):

first-M            the tensors of model M before its first forward
state-K            parameters, buffers and optimizer state after update K - 1
start-K            the same as sketches
grad-K-0-rN        gradients before clipping, on rank N
local-K-B-rN       what backward B of the update has added on rank N, before a reduction
moved-K-rN         by how much the forwards since the last update have changed buffers, on rank N
take-K-0           gradients that the optimizer gets, on rank 0
after-K-0          parameters and buffers after the update
rank-N.json        the record
order-N            the order of the updates and of the collectives of all ranks, on rank N, a line for each
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as optim

from paceline.comm.dtensor import is_sharded
from paceline.comm.mesh import group_of
from paceline.observe.digests import SOME, digest, tensors_in
from paceline.observe.graph_lines import GraphLines
from paceline.observe.patching import Patches
from paceline.observe.script_stack import ScriptStack, module_files
from paceline.observe.sketches import sketch, sketched
from paceline.observe.trained_tensors import TrainedTensors, copy_into, part_name, whole
from paceline.observe.update_order import COLLECTIVE, JOIN, UPDATE, UpdateOrder
from paceline.observe.write_tracer import WriteTracer
from paceline.step.backends import allows_tf32
from paceline.torch_private.core import parameters_of
from paceline.trials.spec import TrialEnded, TrialSpec
from paceline.verify.plain_worker.batch_function import BatchFunctionFinder, BatchFunctionReplacer
from paceline.verify.plain_worker.batch_norm import norm_of_each_rank
from paceline.verify.plain_worker.examples import Loaders, Replay
from paceline.verify.plain_worker.script_places import ScriptPlaces
from paceline.verify.plain_worker.step_draws import StepDraws
from paceline.verify.worker.perturbation import nudge_weights
from paceline.verify.worker.record_files import (
    disk_space,
    first_value,
    new_step_record,
    optimizer_options,
    save_tensors,
)

PORTED = "paceline.verify.worker.recorder"  # imported by `paceline.start` in a trial
_LOCATED_PASSES = 2  # backwards and updates whose nodes of the loss have lines in the script
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_LOSS_NODES = 16
_SHARDING = ("FSDPModule", "FullyShardedDataParallel")
_GATHERS = ("all_gather", "all_gather_into_tensor")  # their results have no gradient
_OF_ALL = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter"),
    *("all_to_all_single", "all_to_all", "barrier"),
)


def _suspending_draws(method: Callable[..., Any]) -> Callable[..., Any]:
    """The recorder's own random numbers are not draws of the script."""

    @functools.wraps(method)
    def suspended(recorder: PlainRecorder, *args: Any) -> Any:
        with recorder.draws.suspended():
            return method(recorder, *args)

    return suspended


def install(spec: TrialSpec, kind: str, script: str) -> PlainRecorder:
    """Start to record. Call it once, as soon as torch has been imported."""
    roots = [os.path.realpath(script)] if kind == "script" else [*module_files(script), os.getcwd()]
    return PlainRecorder(spec, ScriptStack(roots))


def _communicates(module: nn.Module) -> bool:
    """Whether all ranks make collectives for this forward together. These are not calls of torch.distributed's
    functions."""
    if isinstance(module, DistributedDataParallel):
        return bool(module.require_backward_grad_sync)
    return any(cls.__name__ in _SHARDING for cls in type(module).__mro__)  # not imported, since this takes long


class PlainRecorder:
    """Records one process from the import of torch to its end."""

    def __init__(self, spec: TrialSpec, stack: ScriptStack) -> None:
        assert spec.reference is not None
        self._spec, self._stack, self._reference = spec, stack, spec.reference
        self._rank = int(os.environ.get("RANK", "0"))
        self._subject: list[dict[str, Any]] = []  # the records of the subject run's ranks, in another run
        if not spec.is_subject:
            for rank in range(spec.processes):
                with open(os.path.join(self._reference, f"rank-{rank}.json")) as file:
                    self._subject.append(json.load(file))
        self._trained = TrainedTensors(spec.in_parts, self._rank if spec.is_subject else None)
        self._other_shapes: list[str] = []  # tensors with other shapes than in the subject run
        self._parts_are_own = True  # whether the ranks' parts, joined, are the first weights of this run
        self._steps: list[dict[str, Any]] = []
        self._current = new_step_record(0, 0)
        self._loss_nodes: list[list[Any]] = []  # [name, file, line] of nodes of the first loss, from the loss down
        self._losses: list[float] = []
        self._backwards = 0  # in this update
        self._local: list[dict[str, Tensor]] = []  # what each backward of this update has added, on this rank alone
        self._model_has_loss = False  # whether a model returned a scalar
        self._norm: float | None = None  # of the gradients before clipping
        self._before_clipping: dict[str, Tensor] = {}
        self._order: UpdateOrder | None = None  # the order of updates and collectives of all ranks, as they happen
        self._in_graph = 0  # nested backwards under way
        self._computes_sharded = False  # whether a module computed with a shard of its weights
        self._buffers_before: dict[str, Tensor] | None = None  # before the first forward of this update
        self._in_forward: nn.Module | None = None  # the outermost module of the current forward
        self._evaluation: tuple[nn.Module, AbstractContextManager[None]] | None = None  # the current evaluation
        self._depth = 0  # nested calls of optimizers' `step`
        self._precision = "fp32"
        self._problem = ""  # why the runs cannot be compared
        # the number of updates to record: in another run, as many as all ranks of the subject run have recorded
        self._last = min([spec.steps, *(max(1, len(record["steps"])) for record in self._subject)])
        self._joins = 0  # the number of Join contexts that are open
        self._join_group: Any = None  # the processes that need each other until the end of the last Join
        self._waits_for_join = False  # whether all updates are recorded, and other ranks still need this one
        self._rates: list[list[float]] = []  # the learning rates that this run computed itself
        self._pid = os.getpid()
        self._written = False
        self._replay = None if spec.is_subject else self._make_replay()
        self.draws = StepDraws()
        self._patches = Patches(self._is_active)
        lengths = None if spec.is_subject else self._subject[0]["lengths"]
        repeats = self._replay.repeats if self._replay is not None else 1
        self._places = ScriptPlaces(stack, self._patches, self._is_active, lengths, repeats)
        self._function = BatchFunctionFinder(
            begin=lambda: self._loaders.before_fetch(),
            store=lambda parts: self._loaders.record_function(parts),
            evaluating=self.draws.suspended,
        )
        self._tracer = WriteTracer(
            stack,
            self._trained_parameters,
            self._patches,
            self._is_active,
            self._function.on_call,
            self._function.on_return,
        )
        self._graph_lines = GraphLines(stack, _LOCATED_PASSES) if spec.is_subject else None
        folder = spec.directory if spec.is_subject else self._reference
        self._loaders = Loaders(folder, self._rank, self.draws, self._patches, self._replay, self._is_active)
        self._install()
        name = None if spec.is_subject else self._subject[0]["batch_function"]
        if name is not None:
            BatchFunctionReplacer(name, self._loaders.function_batch, stack, self._is_active, self.draws.suspended)
        elif spec.is_subject:
            self._tracer.start()
        atexit.register(self.finish)

    def _make_replay(self) -> Replay:
        passes = [record["passes"] for record in self._subject]
        return Replay(
            self._reference,
            passes,
            only_rank=self._spec.only_shard,
            separately=self._spec.separate_batches,
            reverse=self._spec.reversed_batches,
            common=self._spec.divided_model or bool(self._spec.in_parts),
            dispatched=self._spec.dispatched,
        )

    def _is_active(self) -> bool:
        ended = self._written or self._waits_for_join
        return os.getpid() == self._pid and not ended and PORTED not in sys.modules

    def _install(self) -> None:
        register_module_forward_pre_hook(self._before_forward)  # type: ignore[arg-type]  # it may return arguments
        register_module_forward_hook(self._after_forward, always_call=True)
        optim.register_optimizer_step_pre_hook(self._before_update)
        optim.register_optimizer_step_post_hook(self._after_update)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPPING:
                self._patches.wrap(owner, name, self._wrap_clipping)
        for name in ("backward", "grad"):
            self._patches.around(torch.autograd, name, self._around_graph)
        self._patches.before(torch.autograd, "backward", self._before_backward)
        for name in _GATHERS:
            self._patches.wrap(torch.distributed, name, self._wrap_gather)
        if self._spec.is_subject:
            self._order = UpdateOrder(self._spec.directory, self._rank)
            for name in _OF_ALL:
                self._patches.before(torch.distributed, name, self._count_collective)
            self._patches.wrap(Join, "__init__", self._wrap_making_of_join)
            self._patches.wrap(Join, "__enter__", self._wrap_join)
            self._patches.wrap(Join, "__exit__", self._wrap_end_of_join)
        if not self._spec.is_subject and self._spec.only_shard is None and not self._spec.separate_batches:
            norm_of_each_rank(self._patches, lambda: self.draws.sizes)

    # --- collectives

    def _wrap_making_of_join(self, original: Any) -> Any:
        def init(join: Any, joinables: Any, *args: Any, **options: Any) -> None:
            original(join, joinables, *args, **options)
            self._join_group = joinables[0].join_process_group

        return init

    def _wrap_join(self, original: Any) -> Any:
        def enter(join: Any) -> Any:
            if self._is_active():
                self._add_to_order(JOIN)
            self._joins += 1
            return original(join)

        return enter

    def _wrap_end_of_join(self, original: Any) -> Any:
        """Within Join, ranks make different numbers of updates, and need each other until its end. They end there if
        one of them has recorded its updates, or if from now on their updates do not have the same numbers."""

        def leave(join: Any, *error: Any) -> Any:
            result = original(join, *error)
            self._joins -= 1
            if not self._joins and os.getpid() == self._pid and error[:1] == (None,):
                made = group_of(self._join_group).gather((len(self._steps), self._waits_for_join))
                fewest = min(steps for steps, _ in made)
                if any(waits or steps != fewest for steps, waits in made):
                    self._steps, self._waits_for_join = self._steps[:fewest], False
                    self.finish()
                    raise TrialEnded(0)
            return result

        return leave

    def _trained_parameters(self) -> list[Tensor]:
        return [tensor for tensor in self._trained.tensors().values() if tensor.requires_grad]

    def _count_collective(self, *args: Any, group: Any = None, **_: Any) -> None:
        """Count a collective of all ranks. All ranks make these in the same order."""
        found = group if group is not None else next((one for one in args if isinstance(one, ProcessGroup)), None)
        if found is None or get_world_size(found) == self._spec.processes:
            self._add_to_order(COLLECTIVE)

    def _add_to_order(self, kind: str) -> None:
        if self._order is not None and self._is_active():
            self._order.add(kind, self._stack.caller())

    def _wrap_gather(self, original: Any) -> Any:
        """Note a gather whose result has no gradient, although its input has one. In one process, the result is the
        input, so let the gradient pass."""

        signature = inspect.signature(original)

        def gather(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            output, tensor = list(signature.bind(*args, **options).arguments.values())[:2]
            lost = self._is_active() and torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad
            if lost and self._spec.is_subject:
                self._places.lines.setdefault("cut_gather", self._stack.caller())
            elif lost and not self._spec.separate_batches and self._spec.only_shard is None:
                if result is not None:
                    result.wait()
                target = output if isinstance(output, Tensor) else output[0]
                with contextlib.suppress(RuntimeError):  # a view may not be written in place
                    target.copy_(tensor.view_as(target)).register_hook(self._note_gradient_in_gather)
            return result

        return gather

    def _note_gradient_in_gather(self, grad: Tensor) -> None:
        if self._is_active() and bool(grad.any()):
            self._current["gradient_in_gather"] = True

    # --- forwards and backwards

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._is_active():
            return None
        if not torch.is_grad_enabled():
            self._before_evaluation(module)
            return None
        if not self._steps:
            self._note_precision(module)
        if self._in_forward is not None or self._in_graph or self._is_unfinished(module):
            return None
        self._in_forward = module
        self._tracer.in_forward = True
        self._places.note_forward(module)
        if not self._trained.has_parameters_of(module):
            self._add_model(module)
            if self._spec.is_subject:
                self._tracer.start()
        if self._buffers_before is None:
            found, names = self._trained.tensors(), self._trained.buffers()
            plain = {name: found[name] for name in names if not is_sharded(found[name]) and not found[name].is_meta}
            self._buffers_before = {name: tensor.clone() for name, tensor in plain.items()}
        if module.training and _communicates(module):  # one rank may evaluate alone
            self._add_to_order(COLLECTIVE)
        if self._function.searching and self._spec.is_subject:
            # a global hook gets no keyword arguments: they are in the frame of the module's call
            options = sys._getframe(1).f_locals.get("kwargs", {})
            self._function.searching = self._loaders.none_used
            if self._function.searching:
                self._function.find((args, options))
        inputs = list(tensors_in(args))
        self._current.setdefault("inputs", []).append([digest(one) for one in inputs])
        self._current["elements"] = self._current.get("elements", 0) + sum(one.numel() for one in inputs)
        return self._loaders.inputs(args)

    def _around_graph(self, *_: Any, **__: Any) -> Generator[None, Any, None]:
        """Forwards in a backward compute activations again, for checkpointing. They are no steps of the script."""
        self._in_graph += 1
        try:
            yield
        finally:
            self._in_graph -= 1

    def _is_unfinished(self, module: nn.Module) -> bool:
        """Whether this forward gives lazy parameters their shapes. It comes before training."""
        tensors = () if self._steps else (*module.parameters(), *module.buffers())
        return any(map(is_lazy, tensors))

    def _before_evaluation(self, module: nn.Module) -> None:
        """Rank 0 alone may evaluate: its draws must not shift the numbers of the next training step."""
        if self._evaluation is None and self._in_forward is None and not module.training:
            self._evaluation = module, self.draws.aside()
            self._evaluation[1].__enter__()

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._evaluation is not None and self._evaluation[0] is module:
            self._evaluation[1].__exit__(None, None, None)
            self._evaluation = None
        if self._in_forward is not None and not self._steps and not self._computes_sharded:
            # FSDP's weights are whole in a forward; those of torch's tensor parallelism are not
            self._computes_sharded = any(p is not None and is_sharded(p) for p in parameters_of(module).values())
        if self._in_forward is module:
            self._in_forward = None
            self._tracer.in_forward = False
            self._model_has_loss |= any(not one.dim() and one.requires_grad for one in tensors_in(output))

    def _note_precision(self, module: nn.Module) -> None:
        if any(p is not None and p.dtype in (torch.bfloat16, torch.float16) for p in parameters_of(module).values()):
            self._precision = "bf16"
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}[torch.get_autocast_dtype(device)]

    @_suspending_draws
    def _add_model(self, module: nn.Module) -> None:
        """Save the first weights of a model, or load those of the subject run."""
        number = len(self._trained.models)
        new = self._trained.add_model(module)
        if not new:
            return
        if self._spec.is_subject:
            for name, tensor in new.items():
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad and not is_sharded(tensor):
                    tensor.register_hook(functools.partial(self._note_local, name))
            found = whole(new)
            self._current["start"] |= {name: digest(value) for name, value in found.items()}
            self._save(found, f"first-{number}")
            return
        state = self._read(f"first-{number}")
        self._divide(state)
        self._load(state)

    def _divide(self, state: Mapping[str, Tensor]) -> None:
        """Divide the parameters that the ranks hold parts of."""
        ranks = range(self._spec.processes)
        parts = {name: [state.get(part_name(name, rank)) for rank in ranks] for name in self._spec.in_parts}
        shapes = {name: [one.shape for one in found if one is not None] for name, found in parts.items()}
        self._note_shapes(self._trained.divide({name: found for name, found in shapes.items() if found}))
        own = self._whole(self._trained.tensors())
        names = [part_name(name, rank) for name in parts for rank in ranks]
        for name in names:
            if name in own and name in state:
                matrix = own[name].dim() > 1
                shows = not matrix or bool((own[name] != own[name].flatten()[0]).any())  # zeros fit any division
                self._parts_are_own &= shows and torch.equal(own[name], state[name])

    def _note_shapes(self, wrong: list[str]) -> None:
        self._other_shapes += [name for name in wrong if name not in self._other_shapes]
        if wrong and not self._problem:
            self._problem = f"one process builds other parameters than your run: the shape of {wrong[0]} differs"

    def _save(self, tensors: Mapping[str, Tensor], name: str, sketches: bool = False) -> None:
        """Save tensors that all ranks hold, and the parts that each rank holds. sketches: save their sketches."""
        if self._rank:
            own = part_name("", self._rank)
            tensors, name = {key: v for key, v in tensors.items() if key.endswith(own)}, f"{name}-r{self._rank}"
        if tensors or not self._rank:
            save_tensors(sketched(tensors) if sketches else tensors, self._path(name))

    def _read(self, name: str) -> dict[str, Tensor]:
        """The tensors of the subject run that `_save` wrote; empty if there are none."""
        names = [name, *(f"{name}-r{rank}" for rank in range(1, self._spec.processes))]
        paths = [os.path.join(self._reference, f"{one}.safetensors") for one in names]
        return {key: value for path in paths if os.path.exists(path) for key, value in load_file(path).items()}

    def _note_local(self, name: str, grad: Tensor) -> None:
        """Keep what the current backward adds to a gradient. The hook runs before the ranks' gradients are reduced."""
        if not self._is_active() or not self._backwards or grad is None or grad.layout is not torch.strided:
            return
        with self.draws.suspended():
            value = sketch(grad.detach())
        while len(self._local) < self._backwards:
            self._local.append({})
        known = self._local[-1].get(name)
        self._local[-1][name] = value.clone() if known is None else known + value

    def _load(self, state: dict[str, Tensor]) -> None:
        if self._spec.perturbed:
            weights = dict(state)
            nudge_weights([weights], set(state) - self._trained.buffers(), 1 + len(self._steps))
            state = weights
        self._note_shapes(self._trained.load(state))

    def _before_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        if self._spec.only_shard is not None and self._backwards:
            with self.draws.suspended():
                found = {n: p.grad for n, p in self._trained.tensors().items() if p.is_leaf and p.grad is not None}
                save_tensors(self._sketched(found), self._path(f"part-{len(self._steps)}-{self._backwards}"))
        self._backwards += 1
        self._places.lines["backward"] = self._stack.caller()
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._losses += [float(loss.detach()) for loss in losses if loss.numel() == 1]
        if self._graph_lines is not None:
            if not self._loss_nodes:
                nodes = self._graph_lines.nodes(losses[0].grad_fn)
                self._loss_nodes = [[n.name(), *self._graph_lines.line_of(n)] for n in islice(nodes, _LOSS_NODES)]
            self._graph_lines.after_pass()

    # --- updates

    def _wrap_clipping(self, original: Any) -> Any:
        def clip(parameters: Any, *args: Any, **options: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._is_active():
                self._places.lines["clip"] = self._stack.caller()
                known = {id(p): name for name, p in self._trained.tensors().items()}
                grads = {known[id(p)]: p.grad for p in parameters if id(p) in known and p.grad is not None}
                for name, value in self._sketched(grads).items():
                    self._before_clipping.setdefault(name, value.clone())
            norm = original(parameters, *args, **options)
            if self._is_active() and isinstance(norm, Tensor):
                self._norm = float(whole({"norm": norm})["norm"])
            return norm

        return clip

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record the gradients. If the optimizer gets a closure, this happens when the closure has been evaluated."""
        self._depth += 1
        if self._depth > 1 or not self._is_active():  # an optimizer inside another one
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if self._makes_state(optimizer):
                return None
            self._record_gradients(optimizer)
            return None
        evaluations = 0

        def evaluated() -> Any:
            nonlocal evaluations
            result = closure()
            evaluations += 1
            if evaluations == 1:
                self._record_gradients(optimizer)
            else:
                self._problem = self._problem or "the optimizer evaluates its closure several times in an update"
            return result

        if len(args) > 1:
            return (args[0], evaluated, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluated}

    def _makes_state(self, optimizer: Any) -> bool:
        """Whether torch.distributed.checkpoint makes an optimizer's state, by a step without a rate or a backward."""
        return (
            not self._steps and not self._backwards and not any(group.get("lr", 1) for group in optimizer.param_groups)
        )

    @_suspending_draws
    def _record_gradients(self, optimizer: Any) -> None:
        self._add_to_order(UPDATE)
        self._trained.number_of(optimizer)
        step, current = len(self._steps), self._current
        parameters = self._trained.parameters(optimizer)
        grads = self._whole({name: p.grad for name, p in parameters.items() if p.grad is not None})
        if not self._steps:
            current["start"] |= {name: digest(value) for name, value in whole(parameters).items()}
        self._save(self._whole(self._trained.tensors()), f"start-{step}", sketches=True)
        own = {**sketched(grads), **{n: v for n, v in self._before_clipping.items() if n in grads}}
        save_tensors(own, self._path(f"grad-{step}-0-r{self._rank}"))
        for number, added in enumerate(self._local):
            save_tensors(added, self._path(f"local-{step}-{number}-r{self._rank}"))
        self._save_moved_buffers(step)
        current["before"] = {name: digest(value) for name, value in whole(parameters).items()}
        current["not_finite"] = [name for name, grad in grads.items() if not grad.isfinite().all()]
        current["gradient_digests"] = {name: digest(grad) for name, grad in grads.items()}
        options = optimizer_options(optimizer)
        self._rates.append([group["lr"] for group in options if "lr" in group])
        if self._spec.is_subject:
            self._save(grads, f"take-{step}-0")
        else:
            self._take(optimizer, step, parameters)
            options = optimizer_options(optimizer)
        current["options"] = options
        current["lrs"] = [group["lr"] for group in options if "lr" in group]
        current["lines"] = {**self._places.lines, "step": self._stack.caller()}
        current["writes"] = self._tracer.take()
        current["clip_norm"], current["loss_values"] = self._norm, self._losses

    def _save_moved_buffers(self, step: int) -> None:
        now, moved = self._trained.tensors(), {}
        for name, before in (self._buffers_before or {}).items():
            value = now.get(name)
            if value is not None and value.shape == before.shape and not torch.equal(value, before):
                moved[name] = value.cpu().double() - before.cpu().double()
        self._buffers_before = None
        if moved:
            save_tensors(sketched(moved), self._path(f"moved-{step}-r{self._rank}"))

    def _take(self, optimizer: Any, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Load the gradients and the options that the subject run updated with."""
        recorded = self._subject[0]["steps"]
        if step >= len(recorded):
            return
        theirs = self._read(f"take-{step}-0")
        for name, p in parameters.items():
            if not self._trained.split({name: p}).keys() <= theirs.keys():
                p.grad = None
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            for part, view in self._trained.split({name: p.grad}).items():
                copy_into(view, theirs[part])
        for group, options in zip(optimizer.param_groups, recorded[step]["options"], strict=False):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    @_suspending_draws
    def _after_update(self, optimizer: Any, *_: Any) -> None:
        self._depth -= 1
        if self._depth or not self._is_active() or self._makes_state(optimizer):
            return
        step, current = len(self._steps), self._current
        current["writes_in_update"] = self._tracer.take()
        if self._graph_lines is not None:
            self._graph_lines.after_pass()
        found = self._whole(self._trained.tensors())
        current["after"] = {name: digest(value) for name, value in found.items()}
        self._save(found, f"after-{step}-0", sketches=True)
        if self._spec.is_subject:
            of_optimizer = whole(self._trained.optimizer_state(optimizer))
            # Ranks that hold different state, as owners of parameters, differ in most elements.
            current["state_digests"] = {key: digest(value, most=SOME) for key, value in of_optimizer.items()}
            state = {**found, **of_optimizer}
            if not step:
                self._limit_steps(state)
            self._save(state, f"state-{step + 1}")
        else:
            state = self._read(f"state-{step + 1}")
            if state:
                # if ranks hold different state, this process keeps its own, which follows from the same gradients
                equal = self._equal_on_ranks(state, step, "state_digests")
                self._trained.load_optimizer(optimizer, equal)
                buffers = self._trained.buffers() & found.keys()
                buffers -= self._equal_on_ranks(dict.fromkeys(buffers), step, "after").keys()
                self._load({name: value for name, value in state.items() if name in found.keys() - buffers})
        current |= {"updates": 1, "yields": self._loaders.yields, "keys": self._loaders.take_keys()}
        current["unmatched"], self.draws.unmatched = self.draws.unmatched, []
        self._steps.append(current)
        self._current = new_step_record(0, len(self._steps))
        self._backwards, self._local = 0, []
        self._places.lines, self._losses, self._norm, self._before_clipping = {}, [], None, {}
        if len(self._steps) >= self._last:
            self._loaders.recording = False
            if self._joins:
                self._waits_for_join = True
                return
            self.finish()
            raise TrialEnded(0)

    def _equal_on_ranks(self, values: Mapping[str, Any], step: int, digests: str) -> dict[str, Any]:
        """Those of the values that all ranks of the subject run hold alike after an update."""
        held = [record["steps"][step][digests] for record in self._subject]
        return {name: value for name, value in values.items() if len({one[name] for one in held if name in one}) == 1}

    def _limit_steps(self, state: Mapping[str, Tensor]) -> None:
        """Record no more updates than the disk can hold.

        One rank decides for all: a rank that looks later sees less space, since others have begun to write.
        """
        tensors = [*state.values(), *self._trained_parameters()]  # a gradient has the size of its parameter
        writers = self._spec.processes if self._spec.in_parts else 1  # each rank writes its parts
        fit = disk_space(self._spec.directory) // max(1, writers * sum(tensor.nbytes for tensor in tensors))
        path = os.path.join(self._spec.directory, "steps-that-fit")
        self._last = min(self._last, first_value(path, max(1, fit)))

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors, with shards of other processes, and divided into the ranks' parts."""
        return self._trained.split(whole(tensors))

    def _sketched(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        return sketched(self._whole(tensors))

    def _path(self, name: str) -> str:
        return os.path.join(self._spec.directory, f"{name}.safetensors")

    # --- the record

    def finish(self) -> None:
        """Write the record. Called once, at the last step or at the end of the process."""
        if not self._is_active():
            return
        self._written = True
        self._tracer.stop()
        tensors = self._trained.split(self._trained.tensors())
        buffers = self._trained.buffers()
        record = {
            "kind": "plain",
            "rank": self._rank,
            "steps": self._steps,
            "passes": self._loaders.passes,
            "examples": self._loaders.examples,
            "parameters": [name for name in tensors if name not in buffers],
            "tied": [],
            "dtypes": {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()},
            "precision": self._precision,
            "tf32": allows_tf32(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "normalised": self._trained.norms,
            "rates": self._rates,
            "problem": self._problem or self._loaders.problem,
            "other_shapes": self._other_shapes,
            "in_parts": list(self._spec.in_parts),
            "computes_sharded": self._computes_sharded,
            "parts_are_own": self._parts_are_own,
            # Whether the recorded examples are all that the losses depend on.
            "complete": self._loaders.has_targets or self._model_has_loss,
            "exhausted": self._replay is not None and self._replay.exhausted,
            "made": self._places.made,
            "lengths": self._places.lengths,
            "batch_function": self._function.name,
            "loss_nodes": self._loss_nodes,
            "strategy": None,
            "shards": 1,
            "full": len(self._steps) == self._last < self._spec.steps,
            "unfinished": None,
            "norms": [],
        }
        with open(os.path.join(self._spec.directory, f"rank-{self._rank}.json"), "w") as file:
            json.dump(record, file)
