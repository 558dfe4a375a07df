"""parameter_server: servers hold parameters and optimizer state, and workers compute gradients.

The last `servers` ranks are servers, the other ranks are workers. Each server owns whole parameters, balanced by bytes.
A server runs the script up to `prepare`, and then serves requests (servers/). It uses the CPU, so N accelerators are
for N workers. All ranks find each other through a gloo process group. From the first `prepare` on, the workers have a
separate group (Mesh.narrow) for collectives of the run and the script.

A step with mode=sync, all workers in lockstep:

  1. backward of the last micro-batch: each worker pushes its shard's gradients to their owners. After all pushes, the
     servers add them in rank order, and answer with the sums: `.grad` is the mean over the global batch.
  2. step: after clipping and other changes by the script, each worker sends its share of the gradients back to their
     owners. After all shares have arrived, each server makes the update with the user's optimizer, and answers with the
     weights.

mode=async, workers not in lockstep: a global batch is split into one chunk per worker, and server 0 assigns chunks to
free workers. A worker computes the mean over its chunk and pushes the gradient. Each server updates at once, with the
settings (such as the learning rate) that were sent with the gradient, and answers with the weights. `staleness=s`: if
more than s updates were made since a gradient's weights were read, the gradient is dropped, and its chunk is assigned
again. Servers record which gradients of a chunk they have applied, so that none is applied twice.

A lost worker or server ends the run.

Traffic per step with W workers, G bytes of gradients and P bytes of weights. In sync, each worker sends G (1 + 1/W) and
receives G + P. In async, G is sent and P received for each chunk. Each of k servers carries 1/k of the traffic of all
workers. Memory: in each worker weights and gradients; on the servers together weights, optimizer state and, in sync,
all workers' gradients until they are added, or a copy of the weights until all workers have received it.

Tensors are sent through ZeroMQ with CURVE in frames of 1 MB. Follows Li et al. 2014, "Scaling Distributed Machine
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

from paceline.comm.mesh import Mesh, world_group
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
from paceline.world import ROLE, Served, World, send_to_launcher

_BETWEEN_PREPARES = (
    "strategy parameter_server: between two run.prepare calls a server can only prepare, but this script trains, "
    "evaluates, saves, restores or sums there ({}). Prepare all models and optimizers before the first training loop, "
    "and restore after the last run.prepare."
)
_NOT_IN_STEP = (
    "{} needs all workers, but with parameter_server:mode=async they are not in step within a training loop. Call it "
    "after the loop. To report values within the loop use run.log."
)


def check(size: int | None, *, mode: str, servers: int, staleness: int) -> None:
    """Raises SettingError for options that cannot work on this number of processes (None: unknown)."""
    if mode not in ("sync", "async"):
        raise SettingError(f"strategy parameter_server: mode={mode!r}: use sync or async.")
    if servers < 1:
        raise SettingError(f"strategy parameter_server: servers={servers}: use 1 or more.")
    if size == 1 and servers > 1:
        raise SettingError(
            f"strategy parameter_server: servers={servers}: this run has 1 process. Start at least {servers + 1}, or "
            "drop servers."
        )
    if size is not None and servers >= size > 1:
        raise SettingError(
            f"strategy parameter_server: servers={servers} of {size} processes leaves no worker. Set servers to "
            f"{size - 1} at most, or start more processes."
        )
    if staleness < -1:
        raise SettingError(f"strategy parameter_server: staleness={staleness}: use 0 or more updates, or -1 for any.")
    if staleness >= 0 and mode == "sync":
        raise SettingError("strategy parameter_server: staleness needs mode=async; in mode=sync no gradient is stale.")


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("parameter_server")


def on_cpu(*, servers: int) -> int:
    """The number of servers: they are the last ranks, and compute on the CPU."""
    return servers


class ParameterServer(LoopStrategy):
    """mode: sync or async. servers: number of server processes. staleness: in async, drop a gradient if its weights are
    older than this number of updates; -1: never."""

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
        if mode == "sync" or self.serves:  # a server computes no shard
            self.plan = one_shard(len(self.workers), min(world.rank, len(self.workers) - 1))
        self.store = GradientStore()
        self._remote = RemoteParameters(servers)
        self._buffers: list[Tensor] = []
        self._prepared = (0, 0, 0)  # numbers of models, optimizers and parameters
        # on a server
        self._listening: Listening | None = None
        self._serving: Serving | None = None
        # on a worker, with mode=async
        self._chunks: Chunks | None = None
        if mode == "async" and world.rank == 0:
            limit = "" if staleness < 0 else f" (at most {staleness} updates old)"
            print(
                "paceline: parameter_server:mode=async changes the mathematics: each update uses "
                f"1/{len(self.workers)} of a global batch and a stale gradient{limit}.",
                file=sys.stderr,
            )

    # --- setting up

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {name: p for p, name in parameter_names(models).items()}
        counts = (len(models), len(optimizers), len(names))
        if counts == self._prepared:  # nothing new, as in a `prepare` that only adds schedulers
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
        """Make the servers listen, and exchange addresses and keys over the process group. Called once."""
        keys = new_keys()
        if self.serves:
            several = self.world.nodes > 1
            host = address_towards(self.world.master_addr, self.world.master_port) if several else "127.0.0.1"
            self._listening = Listening(host)
            sent: tuple[str, bytes] = (self._listening.endpoint, self._listening.keys.public)
        else:
            sent = ("", keys.public)
        everyone = world_group().gather(sent)
        if self._listening is not None:
            self._listening.admit(everyone[rank][1] for rank in self.workers)
        world_group().barrier()  # from here on servers accept workers
        self.mesh.narrow(len(self.workers))
        if self.serves:
            send_to_launcher(os.environ, ROLE, "a parameter server")
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
        """Serve until training has ended, and then raise Served: this process exits with code 0. If the workers reach
        another `prepare`, return."""
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
        """Send the first worker's weights and buffers to all workers."""
        if self.world.rank == 0:
            self._remote.send(self._remote.names, {"op": "set"})
        world_group().broadcast_tensors(self._buffers)  # even without buffers: it also synchronizes the workers
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
        self.check_call("an evaluation or another use of the model on all ranks")

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
        """The tensors that this worker sends. All workers have the same tensors, and each tensor is sent once."""
        return {name: tensors[name] for name in sorted(tensors)[self.world.rank :: len(self.workers)]}

    def _step_alone(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Let the servers apply a chunk's gradient at once, unless it is too old."""
        remote = self._remote
        assert remote.links is not None
        assert self._chunks is not None
        own, key = remote.of(optimizer), str(number)
        if self._chunks.current is None:
            raise UsageError(
                "run.step was called outside a loop over a training loader, which parameter_server:mode=async does "
                "not support. Call it in the loop."
            )
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
        for server, (answer, weights) in remote.ask_all(header, gradients).items():
            if server == 0:
                remote.note_versions(answer)
            remote.store(weights)

    def _steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        made = self._remote.versions.get(str(self._number(optimizer)), 0)
        return (made + self._remote.empty) // len(self.workers)

    def _settings_for(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The inputs of an update besides gradients: the optimizer's options, and the step's seed for random draws."""
        return {"setting": setting_of(optimizer), "seed": torch.default_generator.initial_seed()}

    @torch.no_grad()
    def _at_end(self, begins: bool) -> None:
        """Called at the beginning and at the end of a pass in async. At the beginning the servers receive weights that
        the script has changed. At the end all workers get the same weights, and floating-point buffers are replaced by
        their mean over the workers."""
        remote = self._remote
        if begins:
            changed = remote.changed()
            remote.send(self._share(changed), {"op": "set"})
            remote.note_pulled(changed)
            world_group().barrier()
            return
        remote.pull(remote.names)
        for buffer in self._buffers:
            if buffer.is_floating_point():
                buffer.copy_(world_group().all_reduce(buffer.clone()) / len(self.workers))

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
        world_group().barrier()
        self._remote.note_pulled(self._remote.names)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        links, self._remote.links = self._remote.links, None
        if links is not None:
            links.send_all({"op": "bye"})
            links.close()
