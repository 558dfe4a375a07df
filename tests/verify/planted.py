"""A training script with one fault planted in user code, or its healthy twin: planted.py FAULT [healthy].

How each is planted, since run.prepare and the loader prevent many by themselves. A name is that of the cause to be
found, with a variant behind a stroke.

batch-norm-per-shard              batch_norm="shard"                        | the default, "global"
sum-for-mean                      the loss is a sum, returned as a mean     | paceline.Total(sum, count)
mean-for-sum                      paceline.Total(mean, count)               | paceline.Total(sum, count)
scaled-by-processes               the loss times the number of processes    | the loss
scaled-by-processes/of-two        the second of two losses times that number | the loss
scaled-by-processes/gradient      .grad divided by it after the backward    | .grad as it is
mean-of-means                     a mean over unequally many numbers        | paceline.Total(sum, count)
mean-of-means/batch-norm          the same behind batch norm over the global batch | as above
mean-of-means/gather              the same, and what is only looked at is gathered | as above
mean-of-means/reproducible        the same with reproducible=4, and shards in which nothing counts | as above
in-batch-loss                     the loss centres outputs over its shard   | over the examples one by one
in-batch-loss/weak                a small part of the loss compares examples | the loss
in-batch-loss/norm                the loss is divided by a maximum over x   | the loss
in-batch-loss/gather              gathered, and the own examples compared   | all are
learning-rate-scaled              lr times the number of processes          | lr
learning-rate-scaled/of-two       that of the first of two optimizers       | lr
scheduler-steps                   a scheduler moved once for each process   | once for each update
scheduler-steps/micro-batch       moved in every turn of the loop           | once for each update
clipped-early                     clipped after each micro-batch's backward | by run.step(max_grad_norm=)
clipped-early/by-hand             gradients are shrunk after each micro-batch's backward | by run.step(max_grad_norm=)
clipped-early/hook                a hook clamps each shard's gradient       | clamped after the last backward
buffer-not-synchronised           a buffer is the mean of its shard         | of run.mean of it
buffer-not-synchronised/first     of the first shard, on every rank         | of run.mean of it
registered-late                   a parameter added to the model afterwards | added before
not-in-the-model                  a trained tensor beside the model         | a parameter of a prepared module
initialisation-by-rank            weights scaled by the rank after prepare  | before, alike
initialisation-by-rank/size       before it, by the number of processes     | as torch made them
changed-outside                   rank 0 alone shrinks weights              | every rank does
changed-outside/size              all do, the more the more there are       | by a tenth
changed-outside/of-two            rank 0 alone, between two updates of a step | every rank
changed-outside/state             rank 0 alone clears its momentum          | every rank does
examples-overlap-or-miss          the data set is rolled by the rank        | as it is
examples-overlap-or-miss/sampler  the sampler begins elsewhere on each rank | at the first
other-random-numbers              the data set's noise is from an unseeded generator of its own | from torch's
other-random-numbers/model        the forward seeds torch by the rank, and drops out | drops out
control-by-rank                   rank 1 leaves a layer out                 | no rank does
control-by-rank/later             it does so from the second step on        | no rank does
control-by-rank/loss              rank 1 adds a penalty                     | every rank does
control-by-rank/gather            rank 1 adds a penalty to a loss that gathers | every rank does
control-by-rank/skip              rank 1 leaves a batch out         | no rank does
control-by-rank/gradient          rank 1 shrinks its .grad                  | every rank does
control-by-rank/rate              rank 1 shrinks its lr                     | every rank does
overflow-on-some-ranks/stop       the same, and nonfinite="stop", which ends the run | as below
overflow-on-some-ranks            the last rank's numbers leave the range   | no rank's do
not-deterministic                 the model's noise is from an unseeded generator of its own | no noise

And what is no fault, or cannot be told: order (the loss weighs examples by their place in a pair), chaos (the model
enlarges rounding), noise (from torch's generator), noise/loop (in a loop with batch norm; its bad twin: rank 1 doubles
its loss), alone (fails on one process), memory (fails on large batches),
no-turns (fails where one process computes the shards, and drops out), nan, path (a layer is left out later, by all),
pickled (the model is saved, pickled and copied), tied (two layers share a weight), of-two (two updates in a step, and
dropout).
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

import paceline

FAULT, BAD = sys.argv[1], "healthy" not in sys.argv[2:]
ROWS, GLOBAL_BATCH = 40, 16


def on(name: str) -> bool:
    return name == FAULT and BAD


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rows, targets, and how many of each row's numbers count."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 4, generator=generator)
        self.lengths = torch.randint(1, 5, (ROWS,), generator=generator)
        if on("examples-overlap-or-miss"):
            self.x, self.y, self.lengths = (z.roll(7 * rank, 0) for z in (self.x, self.y, self.lengths))
        self.own = torch.Generator()
        self.own.seed()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        if FAULT != "other-random-numbers":
            return self.x[i], self.y[i], self.lengths[i]
        noise = torch.randn(6, generator=self.own) if BAD else torch.randn(6)
        return self.x[i] + noise, self.y[i], self.lengths[i]


class Rolled:
    """A sampler."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.by) % ROWS for i in range(ROWS)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8) if "batch-norm" in FAULT or FAULT == "noise/loop" else nn.Identity()
        self.drop = nn.Dropout(0.3) if FAULT in ("other-random-numbers/model", "no-turns") else nn.Identity()
        if FAULT == "tied":
            self.second.weight = self.first.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.leave_out = False
        self.seed: int | None = None
        self.own = torch.Generator()
        self.own.seed()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        if FAULT in ("noise", "noise/loop"):
            x = x + torch.randn_like(x)
        if FAULT == "chaos":
            x = torch.sin(1e6 * self.first.weight.square().sum() * x)
        if on("not-deterministic"):
            x = x + torch.randn(x.shape, generator=self.own)
        if FAULT == "tied":
            x = F.pad(x, (0, 2))
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.third(x if self.leave_out else x + torch.tanh(self.second(x)))


def loss_fn(model: Any, batch: Any) -> Any:
    x, y, lengths = batch
    out = model(x)
    if FAULT in ("sum-for-mean", "mean-for-sum"):
        total = ((out - y) ** 2).sum()
        if BAD:
            return total if FAULT == "sum-for-mean" else paceline.Total(total / out.numel(), out.numel())
        return paceline.Total(total, out.numel())
    if FAULT in ("mean-of-means", "mean-of-means/batch-norm", "mean-of-means/gather"):
        if FAULT == "mean-of-means/gather":
            paceline.session.current().gather(out.detach())
        mask = torch.arange(4) < lengths[:, None]
        total = (((out - y) ** 2) * mask).sum()
        return total / mask.sum() if BAD else paceline.Total(total, mask.sum())
    if FAULT == "mean-of-means/reproducible":
        mask = lengths < 3
        total, count = ((out - y).square().sum(1) * mask).sum(), mask.sum()
        return total / count.clamp(min=1) if BAD else paceline.Total(total, count)
    if FAULT == "control-by-rank/gather":
        run = paceline.session.current()
        every = run.gather(out)
        loss = (every @ every.T).square().mean()
        return loss + 0.1 * out.square().mean() if run.world.rank == 1 or not BAD else loss
    if on("in-batch-loss/weak"):
        return F.mse_loss(out, y) + 0.2 * (out - out.mean(0)).square().sum(1).mean()
    if FAULT == "in-batch-loss/norm":
        return F.mse_loss(out, y) / (x.pow(4).max() if BAD else 1)
    if FAULT == "in-batch-loss/gather":
        run = paceline.session.current()
        every = run.gather(out)
        return (out @ out.T if BAD else every @ every.T).square().mean() + 0 * every.sum()
    if FAULT == "order":
        return (((out - y) ** 2).mean(1) * (1 + torch.arange(len(x)) % 2)).mean()
    if FAULT == "nan":
        return F.mse_loss(out, y) * float("nan")
    if FAULT == "memory" and len(x) > GLOBAL_BATCH // 2:
        raise RuntimeError("out of memory")
    if on("in-batch-loss"):
        out = (out - out.mean(0)) / (out.std(0) + 0.1)
    if hasattr(model, "late"):
        out = out + model.late
    return F.mse_loss(out, y)


def main() -> None:
    overflow = FAULT.startswith("overflow-on-some-ranks")
    run = paceline.start(
        batch_norm="shard" if on("batch-norm-per-shard") else "global",
        nonfinite="skip" if FAULT == "overflow-on-some-ranks" else "stop",
        seed=0,
        reproducible=4 if FAULT.endswith("/reproducible") else None,
    )
    if FAULT.endswith("of-two"):
        of_two(run)
        return
    rank, size = run.world.rank, run.world.size
    if (FAULT == "alone" and size == 1) or (FAULT == "no-turns" and "shards" in str(run.settings.strategy)):
        raise RuntimeError("not here")
    model = Net()
    if FAULT == "registered-late" and not BAD:
        model.late = nn.Parameter(torch.zeros(4))
    if on("initialisation-by-rank/size"):
        with torch.no_grad():
            model.first.weight.mul_(size)
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=0.1 * (size if on("learning-rate-scaled") else 1), momentum=0.9
    )
    schedule = ExponentialLR(optimizer, 0.9)
    model, optimizer = run.prepare(model, optimizer)
    beside = Beside(run) if FAULT == "not-in-the-model" else None
    if on("registered-late"):
        model.late = nn.Parameter(torch.zeros(4))
    if on("initialisation-by-rank"):
        with torch.no_grad():
            model.first.weight.mul_(1 + rank)
    model.seed = rank if on("other-random-numbers/model") else None
    if on("clipped-early/hook"):
        model.first.weight.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    micro = 4 if FAULT in ("clipped-early", "clipped-early/by-hand", "scheduler-steps/micro-batch") else None
    order: dict[str, Any] = {"shuffle": True}
    if FAULT == "examples-overlap-or-miss/sampler":
        order = {"sampler": Rolled(3 * rank if BAD else 0)}
    loader = run.loader(Data(rank), global_batch=GLOBAL_BATCH, micro_batch=micro, **order)

    def loss_of_this_rank(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        if FAULT == "control-by-rank/loss" and (rank == 1 or not BAD):
            loss = loss + 0.1 * model.third.weight.square().sum()
        if overflow and BAD and size > 1 and rank == size - 1 and loader.step == 1:
            loss = loss * torch.tensor(1e30) * 1e30
        if beside is not None:
            loss = loss + (beside.scale * batch[0][:, 0] - 1).square().mean()
        return loss * size if on("scaled-by-processes") else loss

    for _ in run.epochs(3):
        for batch in loader:
            model.leave_out = rank == 1 and (on("control-by-rank") or (on("control-by-rank/later") and loader.step > 0))
            model.leave_out |= FAULT == "path" and loader.step > 0
            if on("control-by-rank/skip") and rank == 1 and loader.step == 1:
                continue
            if FAULT == "noise/loop":
                loss = F.mse_loss(model(batch[0]), batch[1])
                run.backward(loss * 2 if BAD and rank == 1 else loss)
                acted = run.step(optimizer)
            elif FAULT in ("clipped-early", "clipped-early/by-hand"):
                run.backward(F.mse_loss(model(batch[0]), batch[1]))
                if on("clipped-early"):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.02)
                elif BAD:
                    for parameter in model.parameters():
                        parameter.grad.clamp_(-0.01, 0.01)
                acted = run.step(optimizer, max_grad_norm=None if BAD else 0.02)
            else:
                run.forward_backward(loss_of_this_rank, model, batch)
                if on("scaled-by-processes/gradient"):
                    for parameter in model.parameters():
                        parameter.grad.div_(size)
                if FAULT == "clipped-early/hook" and not BAD:
                    nn.utils.clip_grad_value_(model.first.weight, 0.02)
                by_rank = 0.9 if rank == 1 or not BAD else 1.0
                if FAULT == "control-by-rank/gradient":
                    model.first.weight.grad.mul_(by_rank)
                if FAULT == "control-by-rank/rate":
                    optimizer.param_groups[0]["lr"] *= by_rank
                acted = run.step(optimizer)
                if FAULT == "changed-outside/state" and (rank == 0 or not BAD):
                    for state in optimizer.state.values():
                        state["momentum_buffer"].zero_()
                if beside is not None:
                    beside.step(run)
                if FAULT == "pickled":
                    torch.save(model, io.BytesIO())
                    pickle.dumps([model, optimizer, copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())])
            if FAULT == "buffer-not-synchronised" and loader.examples:
                mean = batch[0].mean(0)
                with torch.no_grad():
                    model.seen.copy_(mean if BAD else torch.tensor([run.mean(batch[0][:, i]) for i in range(6)]))
            if FAULT == "buffer-not-synchronised/first":
                mean = batch[0].mean(0)
                model.seen.copy_(run.gather(mean[None])[0] if BAD else torch.tensor([run.mean(x) for x in batch[0].T]))
            if FAULT in ("changed-outside", "changed-outside/size") and acted:
                by_rank = 0.9 if rank == 0 or not BAD else 1.0
                with torch.no_grad():
                    model.first.weight.mul_(1 - 0.1 * size if on("changed-outside/size") else by_rank)
            if FAULT == "scheduler-steps" and acted:
                for _ in range(size if BAD else 1):
                    schedule.step()
            if FAULT == "scheduler-steps/micro-batch" and (acted or BAD):
                schedule.step()


def of_two(run: Any) -> None:
    """Two models and two updates in a step, the second with a loss that goes through the first model."""
    first, second = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(6, 6)
    if FAULT == "of-two":
        first.append(nn.Dropout(0.3))
    factor = run.world.size if on("learning-rate-scaled/of-two") else 1
    optimizers = torch.optim.SGD(first.parameters(), lr=0.1 * factor), torch.optim.SGD(second.parameters(), lr=0.1)
    run.prepare(first, second, *optimizers)
    loader = run.loader(Data(0), global_batch=GLOBAL_BATCH, shuffle=True)
    for _ in run.epochs(3):
        for x, _, _ in loader:
            made = second(x)
            run.backward(F.softplus(first(x) - first(made.detach())).mean(), optimizer=optimizers[0])
            run.step(optimizers[0])
            if FAULT == "changed-outside/of-two" and (run.main or not BAD):
                with torch.no_grad():
                    first[0].weight.clamp_(-0.2, 0.2)
            times = run.world.size if on("scaled-by-processes/of-two") else 1
            run.backward(F.softplus(first(made)).mean() * times, optimizer=optimizers[1])
            run.step(optimizers[1])


class Beside:
    """A tensor that is trained beside the model: by itself, or prepared as a module's."""

    def __init__(self, run: Any) -> None:
        module = nn.Module()
        module.scale = nn.Parameter(torch.ones(1))
        self.scale, self.optimizer = module.scale, torch.optim.SGD(module.parameters(), lr=0.5)
        if not BAD:
            run.prepare(module, self.optimizer)

    def step(self, run: Any) -> None:
        if not BAD:
            run.step(self.optimizer)
            return
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    main()
