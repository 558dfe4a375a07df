"""parameter_server: parameters and optimizer state live on servers, and workers compute gradients.

The first ranks are workers, the last `servers` are servers. Each server owns whole parameters, about as many bytes as
any other. A server runs the script up to `prepare` and serves there (servers/), on the CPU: N accelerators are for N
workers. The process group, through which all find each other, is gloo's. From the first `prepare` on the workers have
one of their own (Mesh.narrow), for what the run and the script sum and gather.

mode=sync, all workers in step, a step:

  1. backward of the last micro-batch: each worker pushes its shard's gradients to their owners. When all have come, the
     servers add them in rank order, and answer with the sums: `.grad` is the mean over the global batch.
  2. step: each worker sends its share of the gradients, as clipping or the script left them, back to their owners. When
     all have come, each server makes the update with the user's optimizer, and answers with the weights.

mode=async, workers not in step: a global batch is cut into as many chunks as there are workers, and server 0 hands them
out as workers come free. A worker computes the mean over its chunk, pushes the gradient, and each server updates at
once, with the settings (learning rate) that came with it; the weights come back with the answer. `staleness=s`: a
gradient is dropped, and its chunk handed out again, where more than s updates have been made since its weights were
read; servers know which gradients of a chunk they have applied, so that each counts once.

A worker or a server that is lost ends the run.

Between processes, a step of W workers, G bytes of gradients, P of weights: in sync, for each worker, G (1 + 1/W) up
and G + P down; in async, for each chunk, G up and P down. Each of k servers carries 1/k of that of all workers. Memory:
in each worker weights and gradients; on the servers together weights, optimizer state and, in sync, all workers'
gradients until they are added, or a copy of the weights until all workers have them.

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
from paceline.comm.sockets import Line, Listening, address_towards, new_keys
from paceline.config import StrategySpec
from paceline.data.batch_plan import BatchPlan, WorkQueue, one_shard
from paceline.errors import SettingError, UsageError
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import load_replicated, parameter_names, replicated_state
from paceline.strategies.kit.one_process import as_single
from paceline.strategies.servers.remote_parameters import RemoteParameters, setting_of
from paceline.strategies.servers.served_parameters import ServedParameters
from paceline.strategies.servers.serving import Serving
from paceline.strategies.servers.worker_links import Chunks, Links
from paceline.torch_private.core import mark_stepped
from paceline.world import ROLE, Served, World, tell_launcher

_BETWEEN_PREPARES = (
    "strategy parameter_server: a server runs the script from one run.prepare to the next, and here it is asked to "
    "train, evaluate, save, restore or sum in between ({}). Prepare all models and optimizers before the first "
    "training loop, and restore after the last run.prepare."
)
_NOT_IN_STEP = (
    "{} in a training batch: all workers take part in it, but with parameter_server:mode=async they are not in step "
    "there. Call it after the loop over the loader; for values in it there is run.log."
)


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
        if mode == "sync" or self.serves:  # a server computes none of it
            self.plan = one_shard(len(self.workers), min(world.rank, len(self.workers) - 1))
        self.store = GradientStore()
        self._remote = RemoteParameters(servers)
        self._buffers: list[Tensor] = []
        self._prepared = (0, 0, 0)  # how many models, optimizers and parameters
        # of a server
        self._listening: Listening | None = None
        self._serving: Serving | None = None
        # of a worker, with mode=async
        self._chunks: Chunks | None = None
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
        if first:
            self._connect()
        if self.serves:
            self._serve()
            return
        self._buffers = [buffer for model in self.models for buffer in model.buffers()]
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
        self.mesh.narrow(len(self.workers))
        if self.serves:
            tell_launcher(os.environ, ROLE, "a parameter server")
            return
        remote = self._remote
        remote.links = links = Links(
            [
                Line(*everyone[server], keys, self.world.rank, f"the parameter server of rank {server}")
                for server in self.servers
            ]
        )
        if self.mode == "async":
            self._chunks = Chunks(links, self._at_end, lambda: remote.pull(remote.names), self._steps_of)
            self.plan = WorkQueue(len(self.workers), (0,), self._chunks)

    def _serve(self) -> None:
        """Until training has ended: then this process does, with exit code 0; or until another `prepare` comes."""
        assert self._listening is not None
        if self._serving is None:
            self._serving = Serving(self._listening, ServedParameters(), self.workers)
        mine = self.servers.index(self.world.rank)
        names = {p: name for name, p in self._remote.names.items()}
        self._serving.parameters.add(self._remote.owned(mine), self.optimizers, names)
        if self._serving.serve():
            return
        self.close()
        raise Served

    def _spread(self) -> None:
        """The first worker's weights and buffers become everyone's."""
        if self.world.rank == 0:
            self._remote.send(self._remote.names, {"op": "set"})
        collectives.broadcast_tensors(self._buffers)  # also where there are none, all have then met
        if self.world.rank != 0:
            self._remote.pull(self._remote.names)
        self._remote.note_pulled(self._remote.names)

    # --- the step

    def backward(self, work: Backward) -> None:
        self._refuse_to_serve("a backward")
        backward_here(work)
        if work.final and self.mode == "sync":
            own = {name: p.grad for name, p in self._remote.names.items() if p.grad is not None}
            for _, sums in self._remote.ask_all({"op": "push"}, own).values():
                for name, gradient in sums.items():
                    p = self._remote.names[name]
                    p.grad = gradient.to(p.device)

    def check_call(self, call: str) -> None:
        self._refuse_to_serve(call)
        if self._chunks is not None and self._chunks.current is not None:
            raise UsageError(_NOT_IN_STEP.format(call))

    def synchronize(self) -> None:
        self.check_call("an evaluation, or another use of the model by all")

    def _refuse_to_serve(self, call: str) -> None:
        """Raises UsageError on a server between two `prepare`s."""
        if self._serving is not None:
            raise UsageError(_BETWEEN_PREPARES.format(call))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        update = self._step_alone if self.mode == "async" else self._step_together
        update(self._number(optimizer), optimizer)
        mark_stepped(optimizer)

    def completed(self, optimizer: torch.optim.Optimizer, updated: bool) -> int:
        return int(updated) if self._chunks is None else self._chunks.completed(optimizer)

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return next(i for i, own in enumerate(self.optimizers) if own is optimizer)

    def _step_together(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        remote = self._remote
        own, changed = remote.of(optimizer), remote.changed()
        gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
        remote.send(self._share(changed), {"op": "set"})
        header = {"op": "update", "optimizer": number, **self._settings_for(optimizer)}
        for _, weights in remote.ask_all(header, self._share(gradients)).values():
            remote.store(weights)
        remote.note_pulled(changed)

    def _share(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors that all workers have alike, those that this one sends."""
        return {name: tensors[name] for name in sorted(tensors)[self.world.rank :: len(self.workers)]}

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
        """One end of a pass in async. At the beginning the servers get what the script has changed. At the end all
        workers get the same weights, and the same buffers, the mean of the workers'."""
        remote = self._remote
        if begins:
            changed = remote.changed()
            remote.send(self._share(changed), {"op": "set"})
            remote.note_pulled(changed)
            collectives.barrier()
            return
        remote.pull(remote.names)
        for buffer in self._buffers:
            if buffer.is_floating_point():
                buffer.copy_(collectives.all_reduce(buffer.clone()) / len(self.workers))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        whole = replicated_state(self.models, self.optimizers)
        for number, own in enumerate(whole["optimizers"]):
            own["state"] = self._remote.state(number)
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        if self.world.rank == 0:
            self._remote.send(self._remote.names, {"op": "set"})
            for number, optimizer in enumerate(self.optimizers):
                self._remote.send_state(number, optimizer)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        collectives.barrier()
        self._remote.note_pulled(self._remote.names)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        links, self._remote.links = self._remote.links, None
        if links is not None:
            links.send_all({"op": "bye"})
            links.close()
