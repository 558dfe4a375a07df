"""Several replicas in one process, for data_parallel, mirrored, central_storage and reproducible runs with batch norm.

The user's models are the first replica; each further device has a copy of them. The phases of a global batch:

1. Follow: the copies get the script's changes to its models: changed weights and buffers, `requires_grad`, numbers such
   as `training` or a temperature, hooks on parameters. If the structure of a model has changed, it is copied again.
2. Forward: each replica runs the closure on its shard, in its thread. Batch norms of several replicas exchange their
   sums between the threads (comm/threads.py).
3. Backward: each replica accumulates gradients in its parameters' `.grad` over all micro-batches, in its thread.
4. Combine, in the last micro-batch: the strategy combines these gradients.

Buffers that a forward changes stay separate per replica, as they do per rank under ddp. But before an update, running
statistics that batch norms compute per shard are replaced by their mean over the replicas.

The threads of a process share the host's random generators (torch's, Python's and NumPy's), so replicas take turns:
they run their closures, or their backwards, one after the other, each with a separate generator state. On CPUs the
results are the same as on separate devices, but training is not faster than on one. Accelerators have separate
generators and still work in parallel, since a replica's turn ends once its work is launched. A closure that waits for a
result (`.item()`) makes the next replica wait too.

In a reproducible run (reproducible.py) each device computes a range of shards, and shards take turns in the same way.
Shards on one device have separate parameters in the same memory, so that each shard has separate gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.devices import add_tensors, copy_tensors
from paceline.comm.group import Replicas
from paceline.comm.mesh import replicas_here
from paceline.comm.threads import ThreadTeam
from paceline.comm.tree_sums import ShardReplicas, TreeSums, ranges
from paceline.data.batch_plan import AllShards
from paceline.data.bundle import Piece
from paceline.data.placement import move
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight, Work, as_gradient
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.strategies.kit.outputs import mapped
from paceline.strategies.replicated.buffer_guard import refuse_changes
from paceline.strategies.replicated.copies import Record, copied, follow_flags
from paceline.torch_private.core import foreach_div_, foreach_norm, version_of

Stamp = tuple[int, int]
"""(version, address) of a parameter. A write that autograd counts changes the version, `p.data = ...` the address."""


class ReplicaSet:
    """The replicas of one process. The first replica has the user's models.

    keep_weights: whether each device updates its weights. If so, weights are sent only after the script has written to
    them. If not, they are sent after `mark_stale`, and when a global batch begins. sums: if given, the replicas are
    this process's shards of a reproducible run, spread over the devices; each device has at least one shard.
    """

    def __init__(
        self, devices: Sequence[torch.device], *, keep_weights: bool = False, sums: TreeSums | None = None
    ) -> None:
        self.models: list[nn.Module] = []
        # For each further replica: the user's parameter -> the replica's parameter. Mutated in place, never rebound.
        self.copies: list[dict[Tensor, Tensor]] = []
        # The `copies` with separate weight memory: one for each further device. Mutated in place.
        self.owners: list[dict[Tensor, Tensor]] = self.copies
        self._sums = sums
        if sums is None:
            self.devices, self._places = list(devices), list(range(len(devices)))
            self.plan = AllShards(len(devices), tuple(self._places))
            self.team = ThreadTeam(len(devices), take_turns=True)
        else:
            spread = enumerate(ranges(len(sums.mine), len(devices)))
            self._places = [place for place, (lo, hi) in spread for _ in range(lo, hi)]
            self.devices = [devices[place] for place in self._places]
            self.owners = []
            self.plan = AllShards(sums.shards, sums.mine)
            member = partial(ShardReplicas, sums=sums)
            self.team = ThreadTeam(len(self.devices), take_turns=True, devices=self.devices, member=member)
        # For each of `copies`: the parameters that it shares memory with, or None.
        self._memories: list[Mapping[Tensor, Tensor] | None] = []
        self._computed = False  # whether there was a forward since the last `average_statistics`
        self._keep_weights, self._all_stale = keep_weights, True
        self._stale: set[Tensor] = set()  # the user's parameters with outdated copies
        # For each further replica: the user's module -> the replica's module.
        self._modules: list[dict[nn.Module, nn.Module]] = []
        self._records: list[Record] = []  # of all modules
        self._stamps: dict[Tensor, Stamp] = {}  # parameters' stamps when all replicas last had the same weights
        self._guards: list[Any] = []  # handles of hooks on parameters
        self._buffer_guards: list[Any] = []  # handles of hooks on modules
        # The number of the last backward call, and whether it was in the last micro-batch of a global batch.
        self._call, self.ended = -1, True

    def setup(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        for model in models:
            model.to(self.devices[0])
        self._remove(self._buffer_guards)
        if self._sums is not None:
            self._buffer_guards = refuse_changes(models)
        self._copy()

    def mark_stale(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Report that the first replica's weights have changed: the weights of this optimizer (None: all). Within a
        global batch other weights are not sent, since graphs that wait for their backward may reference them."""
        if optimizer is None:
            self._all_stale = True
        else:
            self._stale.update(p for group in optimizer.param_groups for p in group["params"])

    def note_equal(self, parameters: Sequence[Tensor]) -> None:
        """Record that all replicas now have the same weights of these parameters."""
        self._stamps.update((p, stamp_of(p)) for p in parameters)

    def close(self) -> None:
        self.team.close()
        self._remove(self._guards)
        self._remove(self._buffer_guards)
        self.copies.clear()
        self._modules, self._records, self._stamps, self.models = [], [], {}, []

    # --- phase 1

    @torch.no_grad()
    def follow(self, call: int) -> bool:
        """Update the copies from the user's models. Returns whether a global batch begins. call: see Work."""
        begins = self.ended and call <= self._call
        if not all(record.holds() for record in self._records):
            self._copy()
            return begins
        everything = not self._keep_weights and (begins or self._all_stale)
        parameters = list(self._stamps)
        sent = [p for p in parameters if everything or p in self._stale or self._stamps[p] != stamp_of(p)]
        if not all(self._can_follow(p) for p in (sent if self._sums is None else parameters)):
            self._copy()
            return begins
        self._send(sent)
        for copies in self.copies:
            for p, its in copies.items():
                follow_flags(p, its)
        buffers: list[tuple[Tensor, list[Tensor]]] = []
        for record in self._records:
            record.send_numbers()
            record.send_buffers(self.devices[1:], buffers)
        for number in range(len(self.copies)):
            copy_tensors([own for own, _ in buffers], [its[number] for _, its in buffers])
        self._all_stale = False
        self._stale.clear()
        return begins

    @torch.no_grad()
    def send_written(self) -> None:
        """Send weights that the script has changed, before an update of all replicas."""
        self._send([p for p, stamp in self._stamps.items() if stamp != stamp_of(p)])

    def _send(self, parameters: Sequence[Tensor]) -> None:
        for copies in self.owners:
            copy_tensors([p.detach() for p in parameters], [copies[p].detach() for p in parameters])
        self.note_equal(parameters)

    def _can_follow(self, own: Tensor) -> bool:
        """Whether the copies of a parameter can hold its values, and still share memory if they did before."""
        return all(
            own.shape == copies[own].shape
            and own.dtype == copies[own].dtype
            and (memory is None or copies[own].data_ptr() == memory[own].data_ptr())
            for copies, memory in zip(self.copies, self._memories, strict=True)
        )

    def _copy(self) -> None:
        """Copy all models again. Shared parameters and modules stay shared. Gradients of the current global batch are
        kept."""
        before = list(self.copies)
        parameters = list(parameter_names(self.models))
        self._remove(self._guards)
        owners: dict[int, dict[Tensor, Tensor]] = {}  # device number -> the parameters that own memory on it
        if self._sums is not None:
            own = _OwnThreadOnly(parameters, self.team.replicas[0])
            self._guards += [p.register_post_accumulate_grad_hook(own) for p in parameters if p.requires_grad]
            owners[0] = {p: p for p in parameters}
        self._modules, self._memories, made = [], [], []
        for number, (device, place) in enumerate(zip(self.devices[1:], self._places[1:], strict=True)):
            memory = owners.get(place)
            counterparts, copies = copied(self.models, parameters, device, memory)
            for p, its in copies.items():
                if before and p in before[number] and before[number][p].shape == its.shape:
                    its.grad = before[number][p].grad
            self._modules.append(counterparts)
            self._memories.append(memory)
            made.append(copies)
            owners.setdefault(place, copies)
        self.copies[:] = made
        self.owners[:] = [copies for place, copies in owners.items() if place]
        modules = {module for model in self.models for module in model.modules()}
        self._records = [Record(m, [copies[m] for copies in self._modules]) for m in modules]
        self._stamps = {}
        self.note_equal(parameters)
        self._all_stale = False
        self._stale.clear()

    def _remove(self, handles: list[Any]) -> None:
        while handles:
            handles.pop().remove()

    # --- phases 2 to 4

    def forward_backward(self, work: Work, combine: Callable[[], None]) -> list[list[Term]]:
        """Implements ClosureStrategy.forward_backward. Call `follow` before. combine(): called after the backward of
        the last micro-batch, except in a reproducible run, where step/tree_accounts.py adds the gradients."""
        self._call, self.ended, self._computed = work.call, work.final, True
        shared = self._sums is not None
        streams = [_stream(device) for device in self.devices]
        trees = [self._swapped(work.model, number) for number in range(len(self.devices))]
        at = list(zip(self.devices, streams, strict=True))
        terms = self.team.run(
            [
                partial(_forward, work, *each, shared)
                for each in zip(trees, work.pieces, range(len(at)), at, strict=True)
            ]
        )
        for record in self._records:
            record.note_buffers()
        inputs = [self._swapped(work.inputs, number) for number in range(len(self.devices))]
        first = self.devices[0]
        for weights, retain_graph in work.passes([[_counted_on(term, first) for term in of_one] for of_one in terms]):
            self.team.run(
                [
                    partial(_backward, *each, retain_graph)
                    for each in zip(terms, weights, inputs, range(len(at)), at, strict=True)
                ]
            )
            if work.final and not shared:
                combine()
        return [[term.detached() for term in of_one] for of_one in terms]

    def _swapped(self, tree: Any, number: int) -> Any:
        """Replace the user's models and parameters in a tree by those of replica `number`."""
        if number == 0:
            return tree
        modules, copies = self._modules[number - 1], self.copies[number - 1]
        return mapped(
            mapped(tree, nn.Module, lambda one: modules.get(one, one)), Tensor, lambda one: copies.get(one, one)
        )

    @torch.no_grad()
    def gather(self) -> None:
        """Add the copies' gradients to those of the first replica, and remove them from the copies."""
        for copies in self.copies:
            sources, targets = [], []
            for p, its in copies.items():
                grad, its.grad = its.grad, None
                if grad is None:
                    continue
                if p.grad is None:
                    p.grad = grad.to(p.device)
                elif grad.is_sparse or p.grad.is_sparse:
                    p.grad = p.grad + grad.to(p.device)
                else:
                    sources.append(grad)
                    targets.append(p.grad)
            add_tensors(sources, targets)

    @torch.no_grad()
    def average_statistics(self) -> None:
        """Before an update: replace running statistics that batch norms compute per shard by their mean over the
        replicas."""
        own = [b for record in self._records for b in record.statistics()]
        if not own or not self._computed:
            return
        self._computed = False
        numbers = range(len(self.copies))
        others = [[b for record in self._records for b in record.statistics(number)] for number in numbers]
        if self._sums is None:
            for theirs in others:
                add_tensors(theirs, own)
        else:
            self._add_in_order(self._sums, own, others)
        foreach_div_(own, len(self.devices))
        for theirs in others:
            copy_tensors(own, theirs)
        for record in self._records:
            record.note_buffers()

    def _add_in_order(self, sums: TreeSums, own: list[Tensor], others: list[list[Tensor]]) -> None:
        """Sum all shards' statistics into the first replica's, and set all counts of batches to the maximum."""
        tree = sums.tree()
        for shard, its in zip(sums.mine, (own, *others), strict=True):
            tree.put(shard, [b.clone() for b in its])
        for b, total in zip(own, sums.gradients(tree, own, "running statistics"), strict=True):
            assert total is not None
            b.copy_(total)
        for record in self._records:
            record.raise_counts()


def stamp_of(parameter: Tensor) -> Stamp:
    return version_of(parameter), parameter.data_ptr()


@torch.no_grad()
def norms_of(parameters: Sequence[Tensor]) -> Tensor:
    """(len(parameters),): the 2-norm of each parameter, in float64, on the parameters' device. Norms reveal writes that
    autograd does not count, such as `p.data.clamp_()`."""
    plain = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    return torch.stack(foreach_norm(plain, 2, dtype=torch.float64))


# --- in a replica's thread


class _OwnThreadOnly:
    """A hook on the user's parameters, which belong to the first shard. It raises UsageError for gradients of other
    shards. The copies have the hook too, but it ignores their gradients."""

    def __init__(self, parameters: Sequence[Tensor], replica: Replicas) -> None:
        self._parameters, self._replica = set(parameters), replica

    def __call__(self, parameter: Tensor) -> None:
        if parameter in self._parameters and replicas_here() is not self._replica:
            raise UsageError(REACHED_FROM_OUTSIDE)


REACHED_FROM_OUTSIDE = (
    "reproducible: the loss function uses parameters of a prepared model that are not in its first argument. With "
    "batch norm over the global batch, and on several devices, each shard has a separate model. Use the `model` of "
    "loss_fn(model, batch), and pass several models as a tuple or dict: run.forward_backward(loss_fn, (model, other), "
    "batch)."
)

_At = tuple[torch.device, Any]


def _stream(device: torch.device) -> Any:
    """The current stream of the calling thread on a device. The replicas' threads use it too."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block the device is the thread's current device, as `torch.zeros(3, device="cuda")` and some kernels
    need."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@contextmanager
def _on(number: int, at: _At) -> Iterator[None]:
    """Within the block the replica's device and stream are current. Adds the replica to an error's notes."""
    device, stream = at
    try:
        with on_device(device), nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
            yield
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"(in replica {number}, which computes on {device})")
        raise


def _forward(work: Work, model: Any, piece: Piece, number: int, at: _At, shared: bool) -> list[Term]:
    if shared:  # the process has only one cache: the first shard to finish would empty it for the others
        torch.set_autocast_cache_enabled(False)
    with _on(number, at):
        piece.batch = move(piece.batch, at[0])  # stored, since a closure may put values into it for the next closure
        return work.compute(model, piece, at[0])


def _backward(
    terms: Sequence[Term],
    weights: Sequence[Weight | None],
    inputs: Sequence[Tensor] | None,
    number: int,
    at: _At,
    retain_graph: bool,
) -> None:
    """Run the backward in this thread. Autograd has only one thread per GPU, in which several replicas of a GPU would
    wait for each other for ever. In this thread the replica's graph determines the order of additions."""
    pairs = [(term.value, weight) for term, weight in zip(terms, weights, strict=True) if weight is not None]
    with _on(number, at), torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(
            [value for value, _ in pairs],
            [as_gradient(weight, value) for value, weight in pairs],
            inputs=inputs,
            retain_graph=retain_graph,
        )


def _counted_on(term: Term, device: torch.device) -> Term:
    """The term, with its count moved to this device, where counts are added. A count that is a number stays as is."""
    count = term.count
    if not isinstance(count, Tensor) or count.device == device:
        return term
    return Term(term.value, count.to(device, non_blocking=device.type != "cpu"))
