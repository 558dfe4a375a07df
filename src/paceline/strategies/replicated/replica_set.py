"""Several replicas in one process, for data_parallel, mirrored, central_storage and reproducible runs with batch norm.

The user's own models are the first replica; each further device has a copy of them. The phases of a global batch:

1. Follow: what the script has changed in its models goes to the copies: weights and buffers that were written to,
   `requires_grad`, numbers such as `training` or a temperature, hooks on parameters. A model whose structure has
   changed is copied anew.
2. Forward: each replica runs the closure on its own shard, in its own thread. Batch norms of several replicas exchange
   their sums between the threads (comm/threads.py).
3. Backward: each replica's, in its thread, into its own parameters' `.grad`, over all micro-batches.
4. Combine, in the last micro-batch: the strategy combines these gradients.

Buffers that a forward changes stay each replica's own, as under ddp each rank's. But running statistics of batch norms
by shard become their mean over the replicas, before an update.

The threads of a process share the host's random generators (torch's, Python's and NumPy's), so replicas take turns: one
after the other runs its closure, or its backward, with the generators in the state that is its own. On CPUs they
compute what as many devices would, no faster. Accelerators have generators of their own and work at the same time all
the same, since a replica's turn lasts until its work is launched; a closure that waits for a result (`.item()`) makes
the next replica wait too. The shards of a reproducible run (reproducible.py), of which each device computes a range,
take turns likewise. Shards on one device have parameters of their own that share one memory, so that each shard has its
own gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.devices import add_tensors, copy_tensors
from paceline.comm.mesh import Replicas, replicas_here
from paceline.comm.threads import ThreadTeam
from paceline.comm.tree_sums import ShardReplicas, TreeSums, ranges
from paceline.data.batch_plan import AllShards, Piece
from paceline.data.placement import move
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight, Work, as_gradient
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.strategies.kit.outputs import mapped
from paceline.strategies.replicated.buffer_guard import refuse_changes
from paceline.strategies.replicated.copies import Record, copied, follow_flags
from paceline.torch_private.core import foreach_div_, foreach_norm, version_of

Stamp = tuple[int, int]
"""(version, address) of a parameter: changes with a write that autograd counts, and with `p.data = ...`."""


class ReplicaSet:
    """The replicas of one process. The first has the user's own models.

    keep_weights: whether each device updates its own weights. They then travel only where the script has written to
    them; else when `mark_stale` was called, and when a global batch begins. sums: the replicas are this process's
    shards of a reproducible run, spread over the devices, of which there are no more than shards.
    """

    def __init__(
        self, devices: Sequence[torch.device], *, keep_weights: bool = False, sums: TreeSums | None = None
    ) -> None:
        self.models: list[nn.Module] = []
        # For each further replica: the user's parameter -> its own. Mutated in place, never rebound.
        self.copies: list[dict[Tensor, Tensor]] = []
        # Those of `copies` that have weights in memory of their own: one for each further device. Mutated in place.
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
        # For each of `copies`: the parameters whose memory it shares, or None.
        self._memories: list[Mapping[Tensor, Tensor] | None] = []
        self._computed = False  # whether there was a forward since the last `average_statistics`
        self._keep_weights, self._all_stale = keep_weights, True
        self._stale: set[Tensor] = set()  # the user's parameters whose copies are out of date
        self._modules: list[dict[nn.Module, nn.Module]] = []  # for each further replica: the user's module -> its own
        self._records: list[Record] = []  # of all modules
        self._stamps: dict[Tensor, Stamp] = {}  # of parameters when all replicas had the same weights
        self._guards: list[Any] = []  # handles of hooks on parameters
        self._buffer_guards: list[Any] = []  # handles of hooks on modules
        # Of the last backward call: its number, and whether it was one of a last micro-batch.
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
        """The first replica's weights have changed: those of this optimizer, or all. In the middle of a global batch no
        others are sent, since graphs that wait for their backward may hold them."""
        if optimizer is None:
            self._all_stale = True
        else:
            self._stale.update(p for group in optimizer.param_groups for p in group["params"])

    def note_equal(self, parameters: Sequence[Tensor]) -> None:
        """All replicas now have the same weights of these."""
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
        """Updates the copies from the user's models. Returns whether a global batch begins. call: see Work."""
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
        """Sends weights that the script has written to, before an update of all replicas."""
        self._send([p for p, stamp in self._stamps.items() if stamp != stamp_of(p)])

    def _send(self, parameters: Sequence[Tensor]) -> None:
        for copies in self.owners:
            copy_tensors([p.detach() for p in parameters], [copies[p].detach() for p in parameters])
        self.note_equal(parameters)

    def _can_follow(self, own: Tensor) -> bool:
        """Whether the copies of a parameter can hold its values; or, where memory is shared, still share it."""
        return all(
            own.shape == copies[own].shape
            and own.dtype == copies[own].dtype
            and (memory is None or copies[own].data_ptr() == memory[own].data_ptr())
            for copies, memory in zip(self.copies, self._memories, strict=True)
        )

    def _copy(self) -> None:
        """Copies all models anew. Parameters and modules that they share stay shared; gradients of the open global
        batch are kept."""
        before = list(self.copies)
        parameters = list(parameter_names(self.models))
        self._remove(self._guards)
        owners: dict[int, dict[Tensor, Tensor]] = {}  # device number -> the parameters that have its memory
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
        """ClosureStrategy.forward_backward, after `follow`. combine(): called after the backward of a last micro-batch;
        not in a reproducible run, where step/tree_accounts.py adds gradients up."""
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
        """A tree of the user's models or parameters, with a replica's in their places."""
        if number == 0:
            return tree
        modules, copies = self._modules[number - 1], self.copies[number - 1]
        return mapped(
            mapped(tree, nn.Module, lambda one: modules.get(one, one)), Tensor, lambda one: copies.get(one, one)
        )

    @torch.no_grad()
    def gather(self) -> None:
        """Adds the copies' gradients to the first replica's, and drops them."""
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
        """Before an update: running statistics of batch norms by shard become their mean over the replicas."""
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
        """Sums all shards' statistics, into the first replica's; and gives all the greatest count of batches."""
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
    """(len(parameters),): the 2-norm of each, in float64, on their device. Norms show writes that autograd does not
    count, as by `p.data.clamp_()`."""
    plain = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    return torch.stack(foreach_norm(plain, 2, dtype=torch.float64))


# --- in a replica's thread


class _OwnThreadOnly:
    """A hook on the user's own parameters, which are the first shard's: refuses gradients of other shards. The copies
    have the hook too, where it does nothing."""

    def __init__(self, parameters: Sequence[Tensor], replica: Replicas) -> None:
        self._parameters, self._replica = set(parameters), replica

    def __call__(self, parameter: Tensor) -> None:
        if parameter in self._parameters and replicas_here() is not self._replica:
            raise UsageError(REACHED_FROM_OUTSIDE)


REACHED_FROM_OUTSIDE = (
    "reproducible: the loss function uses parameters of a prepared model that it has not got from its first argument. "
    "With batch norm over the global batch, and on several devices, each shard has a model of its own: use the `model` "
    "of loss_fn(model, batch), and hand several as a tuple or dict, run.forward_backward(loss_fn, (model, other), "
    "batch)."
)

_At = tuple[torch.device, Any]


def _stream(device: torch.device) -> Any:
    """The stream of the caller's thread on a device, which the replicas' threads are to use."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes it the thread's current device, which `torch.zeros(3, device="cuda")` takes, and some kernels."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@contextmanager
def _on(number: int, at: _At) -> Iterator[None]:
    """Within the block the replica's device and stream are current. Notes the replica on an error."""
    device, stream = at
    try:
        with on_device(device), nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
            yield
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"(in replica {number}, which computes on {device})")
        raise


def _forward(work: Work, model: Any, piece: Piece, number: int, at: _At, shared: bool) -> list[Term]:
    if shared:  # the cache is the process's: the first shard that ends would empty it for the others
        torch.set_autocast_cache_enabled(False)
    with _on(number, at):
        piece.batch = move(piece.batch, at[0])  # kept: a closure may leave something in it for the next closure
        return work.compute(model, piece, at[0])


def _backward(
    terms: Sequence[Term],
    weights: Sequence[Weight | None],
    inputs: Sequence[Tensor] | None,
    number: int,
    at: _At,
    retain_graph: bool,
) -> None:
    """Run the backward in this thread, and not in the one that autograd has for each GPU, where several replicas of a
    GPU would wait for each other for ever. The order of additions is then that of the replica's own graph."""
    pairs = [(term.value, weight) for term, weight in zip(terms, weights, strict=True) if weight is not None]
    with _on(number, at), torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(
            [value for value, _ in pairs],
            [as_gradient(weight, value) for value, weight in pairs],
            inputs=inputs,
            retain_graph=retain_graph,
        )


def _counted_on(term: Term, device: torch.device) -> Term:
    """The term, with a count that is a tensor on this device, where counts are added up."""
    count = term.count
    if not isinstance(count, Tensor) or count.device == device:
        return term
    return Term(term.value, count.to(device, non_blocking=device.type != "cpu"))
