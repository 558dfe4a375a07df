"""parameter_server: parameters and optimizer state live on servers; workers compute gradients, and may die.

The first ranks are workers, the last `servers` are servers. Each server owns whole parameters, about as many bytes as
any other. A server runs the script up to `prepare` and serves there (servers/), on the CPU: N accelerators are for N
workers. The process group, through which all find each other, is gloo's.

mode=sync, all workers in step, a step:

  1. backward of the last micro-batch: each worker pushes its shard's gradients to their owners, and all workers meet at
     server 0. If all have come, each gets the sums, which servers add in rank order, and `.grad` is the mean over the
     global batch. If one has died, or another joins (servers/rejoining.py), all drop their gradients, and the loader
     yields the same global batch again, cut over the members.
  2. step: each worker sends its share of the gradients, as clipping or the script left them, back to their owners. Then
     each server makes the update with the user's optimizer, and the workers get the weights.

mode=async, workers not in step: a global batch is cut into as many chunks as there were workers at first, and server 0
hands them out as workers come free. A worker computes the mean over its chunk, pushes the gradient, and each server
updates at once, with the settings (learning rate) that came with it; the weights come back with the answer. A dead
worker's chunk is handed out again; servers know which chunks they have applied, so that each counts once.
`staleness=s`: a gradient is dropped, and its chunk handed out again, where more than s updates have been made since its
weights were read.

Between processes, a step of W workers, G bytes of gradients, P of weights: in sync, for each worker, G (1 + 1/W) up
and G + P down; in async, for each chunk, G up and P down. Each of k servers carries 1/k of that of all workers. Memory:
in each worker weights and gradients; on the servers together weights, optimizer state and, in sync, all workers'
gradients until they are added.

Tensors travel through ZeroMQ with CURVE in frames of 1 MB. Follows Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server" (servers, push and pull, bounded delay) and Dean et al. 2012, "Large Scale
Distributed Deep Networks" (Downpour SGD).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.comm.mesh import Mesh
from paceline.comm.sockets import Keys, Listening, address_towards, new_keys
from paceline.config import StrategySpec
from paceline.errors import SettingError, UsageError
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.batch_plan import BatchPlan, OneShard, WorkQueue, one_shard
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.one_process import as_single
from paceline.strategies.replicated import load_replicated, parameter_names, replicated_state
from paceline.strategies.servers import rejoining
from paceline.strategies.servers.remote_parameters import RemoteParameters, setting_of
from paceline.strategies.servers.served_parameters import ServedParameters
from paceline.strategies.servers.serving import Serving
from paceline.strategies.servers.worker_links import Chunks, Meetings, Refusing
from paceline.torch_private.core import mark_stepped
from paceline.world import MAY_DIE, ROLE, Served, World, tell_launcher


def check(size: int | None, *, mode: str, servers: int, staleness: int) -> None:
    """Raises SettingError for what cannot work, on this number of processes (None: not known)."""
    if mode not in ("sync", "async"):
        raise SettingError(f"strategy parameter_server: mode={mode!r}: sync or async is needed.")
    if servers < 1:
        raise SettingError(f"strategy parameter_server: servers={servers}: 1 or more are needed.")
    if size == 1 and servers > 1:
        raise SettingError(
            f"strategy parameter_server: servers={servers}: this run has 1 process. Start at least {servers + 1}, or "
            "leave servers out."
        )
    if size is not None and servers >= size > 1:
        raise SettingError(
            f"strategy parameter_server: servers={servers} of {size} processes leaves no worker. Set servers to "
            f"{size - 1} at most, or start more processes."
        )
    if staleness < -1:
        raise SettingError(f"strategy parameter_server: staleness={staleness}: 0 or more updates, or -1 for any.")
    if staleness >= 0 and mode == "sync":
        raise SettingError("strategy parameter_server: staleness is for mode=async; in sync no gradient is old.")


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("parameter_server")


def on_cpu(*, servers: int) -> int:
    """How many processes, those of the last ranks, compute on the CPU: the servers."""
    return servers


class ParameterServer(LoopStrategy):
    """mode: sync or async. servers: how many of the processes are servers. staleness: in async, the greatest lag, in
    updates, of a gradient that is applied; -1: any."""

    def __init__(
        self, world: World, device: torch.device, *, mode: str = "sync", servers: int = 1, staleness: int = -1
    ) -> None:
        check(world.size, mode=mode, servers=servers, staleness=staleness)
        self.world, self.device, self.mode, self.staleness = world, device, mode, staleness
        self.workers = tuple(range(world.size - servers))
        self.servers = tuple(range(world.size - servers, world.size))
        self.serves = world.rank in self.servers
        self.mesh = Mesh(device, world.rank, {"replicate": world.size}, independent=mode == "async")
        self.plan: BatchPlan = WorkQueue(len(self.workers), (0,), None)
        if mode == "sync":
            self.plan = one_shard(len(self.workers), min(world.rank, len(self.workers) - 1))
        self.store = GradientStore()
        self._remote = RemoteParameters(servers)
        self._buffers: list[Tensor] = []
        self._prepared = (0, 0, 0)  # how many models, optimizers and parameters
        # of a server
        self._listening: Listening | None = None
        self._serving: Serving | None = None
        # of a worker
        self._meetings: Meetings  # since its first `prepare`
        self._chunks: Chunks | None = None
        self._cut = self.workers  # the workers over which the global batch at hand is cut
        self._reductions = self._updates = 0
        self._saved_buffers: list[Tensor] = []  # their values before the global batch at hand
        if mode == "async" and world.rank == 0:
            limit = "" if staleness < 0 else f", {staleness} updates old at most"
            print(
                f"paceline: parameter_server:mode=async changes the mathematics: an update is of one of "
                f"{len(self.workers)} parts of a global batch, by a gradient of older weights{limit}.",
                file=sys.stderr,
            )

    # --- setting up

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {name: p for p, name in parameter_names(models).items()}
        counts = (len(models), len(optimizers), len(names))
        if counts == self._prepared:  # nothing is new, as in a `prepare` of schedulers
            return
        self._prepared = counts
        first = not self._remote.names
        self.models, self.optimizers = list(models), list(optimizers)
        for model in self.models:
            model.to("cpu" if self.serves else self.device)
        self._remote.assign(names)
        ticket = rejoining.find_ticket(os.environ) if first else None
        if ticket is not None:
            self._meet_servers(*ticket, joins=True)
        elif first:
            self._connect()
        if self.serves:
            self._serve()
            return
        self._buffers = [buffer for model in self.models for buffer in model.buffers()]
        if self._meetings.arriving:
            return
        if not first:
            self._remote.ask_all({"op": "again"})
        self._spread()

    def _connect(self) -> None:
        """Servers listen; all tell each other addresses and keys, over the process group, once."""
        keys = new_keys()
        if self.serves:
            several = self.world.nodes > 1
            host = address_towards(self.world.master_addr, self.world.master_port) if several else "127.0.0.1"
            self._listening = Listening(host)
            told: tuple[str, bytes] = (self._listening.endpoint, self._listening.keys.public)
        else:
            told = ("", keys.public)
        everyone = collectives.gather_objects(told)
        if self._listening is not None:
            self._listening.admit(everyone[rank][1] for rank in self.workers)
        collectives.barrier()  # from here on workers are let in
        if self._listening is not None:
            tell_launcher(os.environ, ROLE, "a parameter server")
            return
        self._meet_servers([everyone[rank] for rank in self.servers], keys)
        rejoining.leave_ticket([everyone[rank] for rank in self.servers], keys)

    def _meet_servers(self, places: Sequence[rejoining.Place], keys: Keys, joins: bool = False) -> None:
        rank, remote = self.world.rank, self._remote
        self._remote.links = links = rejoining.make_lines(places, self.servers[0], keys, rank)
        self._meetings = meetings = Meetings(
            links,
            rank,
            self.workers,
            self.mode == "sync",
            welcome=self._hand_over,
            join=(lambda: self._join(places)) if joins else None,
        )
        if self.mode == "async":
            self._chunks = Chunks(links, self._at_end, lambda: remote.pull(remote.names), self._steps_of)
            self.plan = WorkQueue(len(self.workers), (0,), self._chunks)
        self.mesh.channel = meetings
        tell_launcher(os.environ, MAY_DIE)

    def _serve(self) -> None:
        """Until training has ended: then this process does, with exit code 0; or until another `prepare` comes."""
        assert self._listening is not None
        if self._serving is None:
            self._serving = Serving(self._listening, ServedParameters(), self.workers, len(self.workers))
        mine = self.servers.index(self.world.rank)
        names = {p: name for name, p in self._remote.names.items()}
        self._serving.parameters.add(self._remote.owned(mine), self.optimizers, names)
        if self._serving.serve():
            self.mesh.channel = Refusing()
            return
        self.close()
        raise Served

    def _spread(self) -> None:
        """The first worker's weights and buffers become everyone's."""
        meetings = self._meetings
        if meetings.rank == 0:
            self._remote.send(self._remote.names, {"op": "set"})
        collectives.broadcast_tensors(self._buffers)
        if meetings.rank != 0:
            self._remote.pull(self._remote.names)
        self._remote.note_pulled(self._remote.names)
        self._save_buffers()

    # --- the step

    def backward(self, work: Backward) -> None:
        if self.serves:
            Refusing().exchange()
        backward_here(work)
        if work.final and self.mode == "sync":
            self._reduce()

    def _reduce(self) -> None:
        """Phase 1 of sync."""
        number, self._reductions = self._reductions, self._reductions + 1
        own = {name: p.grad for name, p in self._remote.names.items() if p.grad is not None}
        self._remote.ask_all({"op": "push", "number": number}, own)
        # Not before the first update, until which the workers compare their data; nor between two of one global batch.
        self._meetings.meet(admit=self._updates > 0 and not self._meetings.updated)
        if self._meetings.members != self._cut or self._meetings.joined:
            self._drop_attempt()
            return
        for _, sums in self._remote.ask_all({"op": "sum", "number": number, "members": self._cut}).values():
            for name, gradient in sums.items():
                p = self._remote.names[name]
                p.grad = gradient.to(p.device)

    @torch.no_grad()
    def _drop_attempt(self) -> None:
        """Workers have died or joined: drops the gradients, and cuts the global batch anew over the members."""
        joined = set(self._meetings.joined)
        lost = set(self._cut) - set(self._meetings.members)
        for p in self._remote.names.values():
            p.grad = None
        for buffer, saved in zip(self._buffers, self._saved_buffers, strict=True):
            buffer.copy_(saved)
        if joined:
            self._hand_over()
        self._cut_anew()
        if self.world.rank == min(set(self._cut) - joined):
            what = rejoining.news(lost, joined)
            print(f"paceline: {what}; {len(self._cut)} go on, cut anew.", file=sys.stderr)

    def _cut_anew(self) -> None:
        self._cut = self._meetings.members
        # Another object than before, also where the numbers are the same.
        self.plan = OneShard(len(self._cut), (self._meetings.rank,))

    # --- a worker that joins while the others are under way

    def _hand_over(self) -> None:
        """Hands the run state over to admitted workers. Weights that the script has changed since the last update go to
        the servers."""
        meetings, remote = self._meetings, self._remote
        assert meetings.handover is not None
        run, changed = meetings.handover.capture(), remote.changed()

        def capture() -> rejoining.RunState:
            remote.send(changed, {"op": "set"})
            counts = self._reductions, self._updates
            return rejoining.run_state(counts, meetings, self.optimizers, self._chunks, self._buffers, run)

        rejoining.hand_over(meetings, self.world.rank, capture)
        remote.note_pulled(changed)

    def _join(self, places: Sequence[rejoining.Place]) -> None:
        meetings, remote = self._meetings, self._remote
        assert remote.links is not None
        rejoining.wait_for_admission(remote.links, places, meetings)
        found = rejoining.hand_over(meetings, self.world.rank, None)
        self._reductions, self._updates = rejoining.load_run_state(
            found, meetings, self.optimizers, self._chunks, self._buffers
        )
        remote.pull(remote.names)
        self._save_buffers()
        if self.mode == "sync":
            self._cut_anew()

    @torch.no_grad()
    def _save_buffers(self) -> None:
        if self.mode == "sync":
            self._saved_buffers = [buffer.clone() for buffer in self._buffers]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        update = self._step_alone if self.mode == "async" else self._step_together
        update(self._number(optimizer), optimizer)
        mark_stepped(optimizer)

    def completed(self, optimizer: torch.optim.Optimizer, updated: bool) -> int:
        return int(updated) if self._chunks is None else self._chunks.completed(optimizer)

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return next(i for i, own in enumerate(self.optimizers) if own is optimizer)

    def _step_together(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Phase 2 of sync."""
        remote = self._remote
        assert remote.links is not None
        own, changed = remote.of(optimizer), remote.changed()
        gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
        self._send_together(changed, "set")
        self._send_together(gradients, "final")
        self._updates += 1
        self._meetings.updated = True
        header = {"op": "update", "optimizer": number, "number": self._updates, **self._settings_for(optimizer)}
        graded = {server: [name for name, _ in pairs] for server, pairs in remote.by_owner(gradients).items()}
        asked = {s: ({**header, "names": graded.get(s, [])}, ()) for s in remote.by_owner(own)}
        for _, weights in remote.links.ask(asked).values():
            remote.store(weights)
        remote.note_pulled(changed)
        self._save_buffers()

    def _send_together(self, tensors: Mapping[str, Tensor], op: str) -> None:
        """Sends tensors that are the same on all workers: each worker sends its share, and others send the share of a
        worker that dies meanwhile."""
        waiting = sorted(tensors)
        while waiting:
            members = self._meetings.members
            senders = {name: members[i % len(members)] for i, name in enumerate(waiting)}
            self._remote.send({n: tensors[n] for n, sender in senders.items() if sender == self.world.rank}, {"op": op})
            self._meetings.meet()
            waiting = [name for name, sender in senders.items() if sender not in self._meetings.members]

    def _step_alone(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """The servers apply a chunk's gradient at once, where it is not too old."""
        remote = self._remote
        assert remote.links is not None
        assert self._chunks is not None
        own, key = remote.of(optimizer), str(number)
        if self._chunks.current is None:
            raise UsageError("run.step outside of a loop over a training loader, with parameter_server:mode=async.")
        if self.staleness >= 0:
            asked = {"op": "admit", "optimizer": number, "version": remote.versions.get(key, 0)}
            if not remote.links.ask_first({**asked, "staleness": self.staleness})["allowed"]:
                self._chunks.refused = True
                remote.pull(own)
                return
        gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
        header = {
            "op": "apply",
            "optimizer": number,
            "chunk": self._chunks.current,
            "call": self._chunks.pushes(number),
        }
        header |= {"admitted": self.staleness >= 0, **self._settings_for(optimizer)}
        for server, (told, weights) in remote.ask_all(header, gradients).items():
            if server == 0:
                remote.note_versions(told)
            remote.store(weights)

    def _steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        made = self._remote.versions.get(str(self._number(optimizer)), 0)
        return (made + self._remote.empty) // len(self.workers)

    def _settings_for(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What an update needs beside gradients. The seed: the step has keyed the generator for what it draws."""
        return {"setting": setting_of(optimizer), "seed": torch.default_generator.initial_seed()}

    @torch.no_grad()
    def _at_end(self, begins: bool) -> None:
        """One end of a pass in async, where all workers meet. All get the same weights; at the end of the pass also the
        same buffers, the mean of the workers'."""
        if begins:
            self._send_together(self._remote.changed(), "set")
            return
        self._remote.pull(self._remote.names)
        self._meetings.enter_phase("between", meet=True)
        for buffer in self._buffers:
            if buffer.is_floating_point():
                buffer.copy_(collectives.all_reduce(buffer.clone()) / self._meetings.size)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        whole = replicated_state(self.models, self.optimizers)
        for number, own in enumerate(whole["optimizers"]):
            own["state"] = self._remote.state(number)
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        if self._meetings.rank == 0:
            self._remote.send(self._remote.names, {"op": "set"})
            for number, optimizer in enumerate(self.optimizers):
                self._remote.send_state(number, optimizer)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        collectives.barrier()
        self._remote.note_pulled(self._remote.names)
        self._save_buffers()

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        links, self._remote.links = self._remote.links, None
        if links is not None:
            links.send_all({"op": "bye"})
            links.close()
        self.mesh.channel = None
