"""Jobs with reproducible=V, and the sha256 of what they end with. Run on several processes by test_reproducible.py."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline
from paceline.comm import tree_sums
from paceline.comm.mesh import world_group
from paceline.errors import ModelError, SettingError

EXAMPLES, BATCH, TOKENS, WORDS = 37, 10, 6, 11  # the last global batch has 7


class Images(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator) + 0.1 * torch.rand(1), index % 5


class Texts(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (TOKENS,), generator=generator)
        return words, torch.where(torch.rand(TOKENS, generator=generator) < 0.4, -100, words)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Dropout(dropout)
        )
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Norms(nn.Module):
    """Batch norm, whose buffers are part of the hash."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=None)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[1](self.norms[0](self.first(x)).relu())
        return self.head(x.mean(dim=(2, 3)))


class Normed(nn.Module):
    """Batch norm over the global batch, in parallel branches of an input that others use too; a weight used twice."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.dropout = nn.Conv2d(3, 6, 3), nn.Dropout(dropout)
        self.again = nn.Conv2d(6, 6, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=None), nn.BatchNorm1d(6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.sigmoid() + self.norms[0](self.again(x)).relu() * x.tanh() + self.dropout(x)
        x = self.norms[1](self.again(x)) + x
        x = self.norms[2](x.mean(dim=(2, 3)))
        return self.head(x + self.again(x[:, :, None, None])[:, :, 0, 0])


class Words(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(words)))


def image_loss(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def mixed_loss(model: nn.Module, batch: Any) -> Any:
    """Two accounts, and numbers of NumPy's, before and after batch norm."""
    first = float(np.random.rand())
    out = model(batch[0] * (0.5 + first)).float()
    out = out * (0.5 + float(np.random.rand()))
    kept = batch[1] != 3
    total = F.cross_entropy(out[kept], batch[1][kept], reduction="sum")
    return paceline.Total(total, kept.sum()), F.cross_entropy(out, batch[1])


def text_loss(model: nn.Module, batch: Any) -> Any:
    """Two accounts: a sum over tokens, whose number differs between examples, and a mean over examples."""
    out = model(batch[0]).float()
    total = F.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return paceline.Total(total, (batch[1] >= 0).sum()), 0.01 * out.square().mean()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for name, buffer in model.named_buffers():
        found.update(name.encode() + buffer.numpy().tobytes())
    for name, p in model.named_parameters():
        found.update(name.encode() + p.detach().numpy().tobytes())
        for key, value in sorted(optimizer.state[p].items()):
            if isinstance(value, Tensor):
                found.update(key.encode() + value.numpy().tobytes())
    return found.hexdigest()


class Losses:
    """A tracker that keeps the losses, on rank 0."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | str, ...]] = []

    def begin(self, config: Any, step: int) -> None: ...

    def log(self, values: Any, step: int, epoch: int) -> None:
        self.seen.append((step, *[float(values[key]).hex() for key in ("loss", "logged")]))

    def close(self) -> None: ...


LOSSES = {"texts": text_loss, "global": mixed_loss}

Kind = tuple[str, int, str, int | None]
"""(the net, V, precision, micro_batch)"""


def train(
    kind: Kind,
    until: int,
    folder: Path | None = None,
    save: bool = False,
    losses: Losses | None = None,
    strategy: str | None = None,
) -> str:
    """The hash after so many steps. folder: where it goes on from, if there is a checkpoint."""
    net, shards, precision, micro_batch = kind
    shard: dict[str, Any] = {"batch_norm": "shard"} if net == "norms" else {}
    own: dict[str, Any] = {"device": "cpu", "seed": 3, "progress": "off", "log_every": 3, **shard}
    run = paceline.start(reproducible=shards, precision=precision, strategy=strategy, **own)
    losses = losses or Losses()
    run.add_tracker(losses)
    model: nn.Module = {"images": Net, "texts": Words, "norms": Norms, "global": Normed}[net]()
    if net != "texts":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    data: Dataset[Any] = Texts() if net == "texts" else Images()
    loader = run.loader(data, global_batch=BATCH, micro_batch=micro_batch, shuffle=True)
    if folder is not None:
        run.restore(folder, missing_ok=True)
    for _ in run.epochs(10):
        for batch in loader:
            loss = run.forward_backward(LOSSES.get(net, image_loss), model, batch)
            run.log(logged=loss)
            if not run.step(max_grad_norm=0.5):
                continue
            if run.steps == until:
                if save and folder is not None:
                    run.save(folder)
                break
        if run.steps == until:
            break
    found = digest(model, optimizer)
    run.close()
    return found


KINDS: list[Kind] = [
    ("images", 4, "fp32", None),
    ("texts", 4, "bf16", 2),
    ("norms", 5, "fp32", 2),
    ("global", 5, "bf16", None),
    ("global", 6, "fp32", None),
    # The fuller matrix:
    ("images", 5, "bf16", 1),
    ("norms", 16, "bf16", None),
    ("texts", 4, "fp16", 1),
    ("texts", 6, "fp32", None),
    ("global", 16, "fp16", None),
    ("images", 16, "fp32", None),  # more shards than examples
]
STEPS = 7


FEW = 5  # of these in every test


def few() -> list[str]:
    return hashes(KINDS[:FEW])


def more() -> list[str]:
    return hashes(KINDS[FEW:])


def hashes(kinds: list[Kind], strategy: str | None = None) -> list[str]:
    found = []
    for kind in kinds:
        losses = Losses()
        found.append(train(kind, STEPS, losses=losses, strategy=strategy))
        found.append(repr(world_group().broadcast(losses.seen)[:2]))  # whole windows of three steps
    return found


def leg() -> list[str]:
    """One leg of a run that goes on elsewhere, from and into the folder that the environment names."""
    folder, until = Path(os.environ["REPRODUCIBLE_FOLDER"]), int(os.environ["REPRODUCIBLE_UNTIL"])
    return [train(kind, until, folder / str(i), save=True) for i, kind in enumerate(KINDS[:FEW])]


LINEAR = 63, 17  # 1088 parameters with the bias


class Counted:
    """What this process sends while it is open, in bytes: the gradient, and in all-reduces."""

    def __init__(self) -> None:
        self.sent, self.reduced = 0, 0
        self._real = dist.all_to_all_single, dist.all_reduce

    def __enter__(self) -> Counted:
        dist.all_to_all_single, dist.all_reduce = self._to_each, self._reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.all_reduce = self._real

    def _to_each(self, received: Tensor, sent: Tensor, *rest: Any, **named: Any) -> Any:
        self.sent += sent.nbytes
        return self._real[0](received, sent, *rest, **named)

    def _reduce(self, tensor: Tensor, *rest: Any, **named: Any) -> Any:
        self.reduced += tensor.nbytes
        return self._real[1](tensor, *rest, **named)


def bytes_of_a_step() -> list[list[int]]:
    """For 4 and for 6 shards, of the second step: [of the gradient, in all-reduces]."""
    found = []
    for shards in (4, 6):
        run = paceline.start(reproducible=shards, device="cpu", progress="off")
        model: nn.Module = nn.Linear(*LINEAR)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        counted = Counted()
        for batch in run.loader([torch.ones(LINEAR[0])] * 24, global_batch=12):
            with counted if run.steps else contextlib.nullcontext():
                run.forward_backward(lambda model, x: model(x).square().mean(), model, batch)
                run.step()
        run.close()
        found.append([counted.sent, counted.reduced])
    return found


class Sometimes(nn.Module):
    """Which of its layers an example goes through depends on the example; in some steps none goes through some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.always = nn.Linear(4, 1)
        self.wide = nn.Linear(4, 4).to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        total = self.always(x).square().sum()
        for i, layer in enumerate(self.layers):
            if len(chosen := x[x[:, 0] == i]):
                total = total + layer(chosen).square().sum() + self.wide(chosen.double()).square().sum().float()
        return total / max(len(x), 1)


def changing() -> str:
    """The hash of a model of which each shard reaches other parameters, in each step others; of two dtypes, in many
    small messages."""
    tree_sums.MESSAGE_BYTES = 70
    run = paceline.start(reproducible=4, device="cpu", progress="off")
    model: nn.Module = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    model, optimizer = run.prepare(model, optimizer)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data[:, 0] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 2, 0, 0, 2, 1, 1, 1, 1])
    for batch in run.loader(list(data), global_batch=4):
        run.forward_backward(lambda model, x: model(x), model, batch)
        run.step()
    found = digest(model, optimizer)
    run.close()
    tree_sums.MESSAGE_BYTES = 2**25
    return found


def others_weights() -> str:
    """Weights that somebody changed on one process are found before the first update."""
    run = paceline.start(reproducible=4, device="cpu", progress="off")
    model: nn.Module = nn.Linear(2, 2)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if run.world.rank:
        nn.init.zeros_(model.weight)
    try:
        for batch in run.loader([torch.ones(2)] * 4, global_batch=4):
            run.forward_backward(lambda model, x: model(x).mean(), model, batch)
    except ModelError as error:
        return str(error)
    finally:
        run.close()
    return ""


def threads_differ() -> str:
    """As where OMP_NUM_THREADS is set on one machine only."""
    os.environ["OMP_NUM_THREADS"] = str(1 + int(os.environ["RANK"]) % 2)
    try:
        paceline.start(reproducible=4, device="cpu", progress="off")
    except SettingError as error:
        return str(error)
    return ""


def together() -> list[Any]:
    """Everything that every test looks at, in one go."""
    return [few(), bytes_of_a_step(), changing(), others_weights(), threads_differ()]


def wide() -> str:
    """The hash after a step of a layer whose products are large enough to be shared between threads."""
    run = paceline.start(reproducible=2, device="cpu", progress="off")
    model: nn.Module = nn.Sequential(nn.Linear(512, 256), nn.LayerNorm(256), nn.Linear(256, 64))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for batch in run.loader(list(data), global_batch=256):
        run.forward_backward(lambda model, x: model(x).square().mean(), model, batch)
        run.step()
    found = digest(model, optimizer)
    run.close()
    return found
