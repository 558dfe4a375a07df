"""Scripts with one fault each, and the line that it is in: marked.py NAME.

Each is the same job with some lines replaced. The line that is sought ends in `# <-`; where two lines are as good
(a statistic, and its use), both do. Made by `script`, which test_lines.py calls.
"""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass

JOB = """
import os
import time

import torch
from torch import nn
from torch.nn import functional as F

import paceline

{before}
run = paceline.start(device="cpu", seed=3)
rank, size = run.world.rank, run.world.size


class Data(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(48, 6, generator=g), torch.randn(48, generator=g)
        self.n = torch.randint(1, 7, (48,), generator=g)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = self.x[i]
        {item}
        return x, self.y[i], self.n[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)
        self.drop = nn.Dropout({p})
        self.calls = 0
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        {hidden}
        return self.b(self.drop(h)).squeeze(1)


{helper}
{seed}
model = Net()
{init}
{optimizer}
model, optimizer = run.prepare(model, optimizer)
{prepared}
data = Data()
{data}
loader = run.loader({loader})
{loaded}
for epoch in run.epochs(2):
    for x, y, n in loader:
        {batch}
        out = model(x)
        {loss}
        {scaled}
        run.backward(loss)
        {after}
        run.step(optimizer)
        {stepped}
"""
DEFAULT = {
    "p": "0.0",
    "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "loader": "data, global_batch=16, shuffle=True",
    "loss": "loss = F.mse_loss(out, y)",
}


@dataclass(frozen=True)
class Marked:
    """causes: any of which is right. changes: of the job's lines, by place."""

    causes: tuple[str, ...]
    changes: dict[str, str]


def _of(causes: str, **changes: str) -> Marked:
    return Marked(tuple(causes.split()), changes)


MARKED = {
    "token-mean": _of(
        "mean-of-means",
        loss="mask = torch.arange(6) < n[:, None]\n        each = ((x * out[:, None] - y[:, None]) ** 2) * mask\n"
        "        loss = each.sum() / mask.sum()  # <-",
    ),
    "token-mean/helper": _of(
        "mean-of-means",
        helper="def masked(each, mask):\n    return each[mask].mean()  # <-\n",
        loss="mask = torch.arange(6) < n[:, None]\n        each = (x * out[:, None] - y[:, None]) ** 2\n"
        "        loss = masked(each, mask)  # <-",
    ),
    "ignore-index": _of(
        "mean-of-means",
        loss="target = torch.where(n > 3, 0, -100)\n"
        "        loss = F.cross_entropy(torch.stack([out, -out], 1), target, ignore_index=-100)  # <-",
    ),
    "times-size": _of("scaled-by-processes control-by-rank", scaled="loss = loss * size  # <-"),
    "over-size": _of("scaled-by-processes control-by-rank", scaled="loss = loss / run.world.size  # <-"),
    "lr": _of("learning-rate-scaled", optimizer="lr = 0.05 * size  # <-\n"
              "optimizer = torch.optim.SGD(model.parameters(), lr=lr)"),
    "lr/inline": _of("learning-rate-scaled", optimizer="optimizer = torch.optim.SGD(\n    model.parameters(),\n"
                     "    lr=0.05 * size,  # <-\n)"),
    "momentum": _of("optimizer-settings", optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.05, "
                    "momentum=1 - 0.2 / size)  # <-"),
    "betas": _of("optimizer-settings", optimizer="b = 0.9 ** size  # <-\n"
                 "optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(b, 0.999))"),
    "schedule": _of(
        "scheduler-steps",
        prepared="schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        stepped="for _ in range(size):\n            schedule.step()  # <-",
    ),
    "rate-by-rank": _of("control-by-rank", after="for group in optimizer.param_groups:\n"
                        "            group['lr'] = 0.05 / (1 + rank)  # <-"),
    "seed": _of("other-random-numbers control-by-rank initialisation-by-rank", p="0.3",
                hidden="torch.manual_seed(100 + rank)  # <-"),
    "seed/data": _of("other-random-numbers control-by-rank", prepared="own = torch.Generator().manual_seed(7 + rank)  # <-",
                     item="x = x + torch.randn(6, generator=own)  # <-"),
    "init": _of("initialisation-by-rank", prepared="with torch.no_grad():\n    model.a.weight.mul_(1 + 0.1 * rank)  # <-"),
    "init/size": _of("initialisation-by-rank", init="nn.init.normal_(model.a.weight, std=0.1 * size)  # <-"),
    "shard-twice": _of("examples-overlap-or-miss", data="data = torch.utils.data.Subset(data, range(rank, 48, size))  # <-"),
    "sampler": _of(
        "examples-overlap-or-miss",
        data="order = [(i + 5 * rank) % 48 for i in range(48)]  # <-",
        loader="data, global_batch=16, sampler=order",
    ),
    "dropout": _of("control-by-rank", p="0.1 + 0.2 * rank)  # <-\n        self.other = nn.Identity("),
    "augment": _of("control-by-rank", item="x = x * (1 + 0.1 * rank)  # <-"),
    "clip": _of(
        "clipped-early control-by-rank",
        loader="data, global_batch=16, micro_batch=4, shuffle=True",
        after="nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # <-",
    ),
    "hook": _of("control-by-rank clipped-early", prepared="model.a.weight.register_hook(lambda g: g * (1 + rank))  # <-"),
    "hook/clamp": _of("clipped-early", prepared="model.a.weight.register_hook(lambda g: g.clamp(-0.02, 0.02))  # <-"),
    "hook/library": _of(
        "control-by-rank clipped-early",
        before="from functools import partial",
        prepared="model.a.weight.register_hook(partial(torch.mul, 1.0 + rank))  # <-",
    ),
    "hook/library-clamp": _of(
        "clipped-early",
        before="from functools import partial",
        prepared="model.a.weight.register_hook(partial(torch.clamp, min=-0.02, max=0.02))  # <-",
    ),
    "hook/after": _of(
        "clipped-early",
        helper="def bound(p):\n    p.grad.clamp_(-0.01, 0.01)  # <-\n",
        prepared="model.a.weight.register_post_accumulate_grad_hook(bound)  # <-",
    ),
    "hook/activation": _of(
        "clipped-early", hidden="h.register_hook(lambda g: g * (1e-3 / (g.norm() + 1e-8)).clamp(max=1.0))  # <-"
    ),
    "hook/module": _of(
        "clipped-early",
        init="bounded = lambda g: g * (1e-3 / (g.norm() + 1e-8)).clamp(max=1.0)\n"
        "model.a.register_full_backward_pre_hook(hook=lambda m, g: (bounded(g[0]),))  # <-",
    ),
    "attribute": _of("control-by-rank", hidden="h = h * self.scale", prepared="model.scale = 1 + 0.1 * rank  # <-"),
    "place-in-shard": _of("depends-on-shard-size", batch="x = x * (torch.arange(len(x)) / len(x))[:, None]  # <-"),
    "grad": _of("control-by-rank", after="if rank == 1:\n            model.a.weight.grad *= 0.5  # <-"),
    "grad/assigned": _of("control-by-rank", after="if rank == 1:\n"
                         "            model.a.weight.grad = model.a.weight.grad.clamp(-0.01, 0.01)  # <-"),
    "weights": _of("changed-outside", stepped="if run.main:\n            model.a.weight.data.clamp_(-0.1, 0.1)  # <-"),
    "state/clear": _of("changed-outside", stepped="if run.main and run.steps == 2:\n            optimizer.state.clear()  # <-"),
    "state/one": _of(
        "changed-outside", stepped="if rank == 0:\n            optimizer.state[model.a.weight]['momentum_buffer'] = None  # <-"
    ),
    "state/before": _of("changed-outside", after="if run.main and run.steps == 1:\n            optimizer.state.clear()  # <-"),
    "state/load": _of(
        "changed-outside",
        prepared="import copy\nfresh = copy.deepcopy(optimizer.state_dict())",
        stepped="if rank == 0:\n            optimizer.load_state_dict(fresh)  # <-",
    ),
    "state/zero": _of(
        "changed-outside",
        stepped="if rank == 0:\n            optimizer.state[model.a.weight]['momentum_buffer'].zero_()  # <-",
    ),
    "weights/load": _of(
        "changed-outside",
        stepped="if rank == 0:\n            model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})  # <-",
    ),
    "teacher": _of(
        "control-by-rank state-outside",
        prepared="import copy\nteacher = copy.deepcopy(model).requires_grad_(False)",
        scaled="loss = loss + F.mse_loss(out, teacher(x))",
        stepped="if run.main:\n            for a, b in zip(teacher.parameters(), model.parameters()):\n"
        "                a.data.mul_(0.5).add_(b.data, alpha=0.5)  # <-",
    ),
    "normalise": _of("in-batch-loss", batch="x = (x - x.mean(0)) / (x.std(0) + 0.1)  # <-"),
    "norm-by-hand": _of("in-batch-loss", hidden="mu = h.mean(0)  # <-\n        h = h - mu  # <-"),
    "contrast": _of(
        "in-batch-loss",
        loss="z = F.normalize(torch.tanh(model.a(x)), dim=1)\n        logits = z @ z.T  # <-\n"
        "        loss = F.cross_entropy(logits, torch.arange(len(x))) + F.mse_loss(out, y)  # <-",
    ),
    "hard": _of("in-batch-loss mean-of-means", loss="each = (out - y) ** 2\n        loss = each.topk(3).values.mean()  # <-"),
    "size-weight": _of("depends-on-shard-size", scaled="loss = loss * len(x) / 16  # <-"),
    "root-size": _of("depends-on-shard-size", scaled="loss = loss / len(x) ** 0.5  # <-"),
    "counter": _of(
        "state-outside depends-on-shard-size",
        loader="data, global_batch=16, micro_batch=4, shuffle=True",
        hidden="self.calls += 1  # <-\n        h = h / (1 + 0.1 * self.calls)  # <-",
    ),
    "running-scale": _of(
        "state-outside",
        prepared="scale = torch.ones(())",
        scaled="loss = loss / scale  # <-\n        scale = 0.9 * scale + 0.1 * loss.detach()  # <-",
    ),
    "running-scale/object": _of(
        "state-outside",
        helper="class Scale:\n    def __init__(self):\n        self.value = 1.0\n\n    def update(self, loss):\n"
        "        self.value = 0.9 * self.value + 0.1 * loss  # <-\n",
        prepared="scale = Scale()",
        scaled="loss = loss / scale.value",
        stepped="scale.update(loss.item())  # <-",
    ),
    "queue": _of(
        "state-outside",
        prepared="queue = torch.zeros(8, 8)",
        scaled="z = torch.tanh(model.a(x))\n        loss = loss + (z @ queue.T).square().mean()  # <-\n"
        "        queue = z.detach()[:8] if len(z) >= 8 else queue  # <-",
    ),
    "layer-by-rank": _of("control-by-rank", hidden="if rank == 1:\n            h = h * 0.5  # <-"),
    "buffer": _of("buffer-not-synchronised", stepped="model.seen.copy_(x.mean(0))  # <-"),
    "penalty": _of("control-by-rank", scaled="if rank == 1:  # <-\n"
                   "            loss = loss + 0.1 * model.a.weight.square().sum()  # <-"),
    "clock": _of("not-deterministic", seed="torch.manual_seed(int(time.time() * 1000) % 2**31)  # <-"),
    "process": _of("not-deterministic", seed="torch.manual_seed(os.getpid())  # <-"),
    "environ": _of(
        "learning-rate-scaled",
        before="world = int(os.environ.get('WORLD_SIZE', 1))",
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world)  # <-",
    ),
}  # fmt: skip


def script(name: str) -> str:
    places = dict.fromkeys(("before", "item", "hidden", "helper", "seed", "init", "prepared", "data", "loaded", "batch",
                            "scaled", "after", "stepped"), "")  # fmt: skip
    return JOB.format(**{**places, **DEFAULT, **MARKED[name].changes})


def marked_lines(text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), start=1) if line.endswith("# <-")]
