"""Models with their data and losses; the plain loop over them, and the same under Paceline.

The plain loop is the reference. It receives the order of the examples from Paceline's loader, and otherwise uses only
torch: to move batches, scale losses, clip and update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.check import CheckFault
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline

Models = Sequence[nn.Module]
Batch = Sequence[Tensor]
Loss = Callable[[Models, Batch], tuple[Tensor, Any]]
Order = list[list[list[int]]]
"""The numbers of the examples: [optimizer step][micro-batch][example]."""


@dataclass(frozen=True)
class Job:
    """Models with their data and losses."""

    make: Callable[[], list[nn.Module]]  # on the CPU; the same weights at each call
    data: Callable[[], TensorDataset]  # on the CPU; the same examples at each call
    losses: tuple[Loss, ...]  # for each model: (sum, count), followed by an update
    batch: int  # examples of an optimizer step


@dataclass(frozen=True)
class Way:
    """The way to train a job."""

    form: str = "loop"  # or "closure"
    micro_batch: int | None = None
    optimizer: str = "sgd"  # a name of OPTIMIZERS
    count: str = "mean"  # form of the loss: a "mean" over examples, or with a count as an "int" or a "tensor"
    clip: float | None = None  # the maximum norm of the gradient
    precision: str = "fp32"
    channels_last: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # further ones of paceline.start
    epochs: int = 2

    def __str__(self) -> str:
        default = Way()
        words = [self.form, self.optimizer]
        words += [f"{name}={value}" for name, value in vars(self).items()
                  if name not in ("form", "optimizer", "settings") and value != getattr(default, name)]  # fmt: skip
        return " ".join(words + [f"{name}={value}" for name, value in self.settings.items()])


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-params": torch.bfloat16, "fp16": torch.float16}
"""The dtype of a model's computation, by precision."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True),
}


def seeded(make: Callable[[], list[nn.Module]]) -> Callable[[], list[nn.Module]]:
    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return make()

    return made


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# --- a perceptron


def mlp_loss(models: Models, batch: Batch) -> tuple[Tensor, Any]:
    return F.cross_entropy(models[0](batch[0]), batch[1], reduction="sum"), len(batch[1])


def perceptron(width: int, depth: int, inputs: int = 64) -> nn.Module:
    sizes = [inputs, *[width] * depth]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def mlp_data() -> TensorDataset:
    g = generator()
    return TensorDataset(torch.randn(77, 64, generator=g), torch.randint(10, (77,), generator=g))


MLP = Job(seeded(lambda: [perceptron(96, 2)]), mlp_data, (mlp_loss,), batch=16)

# --- convolutions with batch norm


def conv(norm: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for i, o in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(o)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


class Whole(nn.Module):
    """A wrapper module: torch 2.13's Module.compile does not compile a bare nn.Sequential, but compiles this."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(x)


def conv_data() -> TensorDataset:
    g = generator()
    return TensorDataset(torch.randn(45, 3, 16, 16, generator=g), torch.randint(10, (45,), generator=g))


CONV = Job(seeded(lambda: [conv()]), conv_data, (mlp_loss,), batch=16)
CONV_TO_COMPILE = replace(CONV, make=seeded(lambda: [Whole(conv())]))
CONV_WITHOUT_NORM = replace(CONV, make=seeded(lambda: [conv(norm=False)]))

# --- a residual network


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, as in He et al. 2015, figure 5, right.

    The first block of a stage has its stride in the first convolution, and a 1x1 convolution as shortcut (option B).
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


class ResNet(nn.Module):
    """ResNet-50 (He et al. 2015, table 1), or a similar network with other depths and widths.

    (batch, 3, height, width) -> (batch, classes).
    """

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, padding=1))
        inputs = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
                inputs = 4 * width << stage
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


# --- a transformer


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder with learned positions and tied embeddings. GPT-2's smallest (Radford et al. 2019, 124 million
    parameters) has width 768, 12 layers, 12 heads, 1,024 tokens and a vocabulary of 50,257.

    recompute: do not keep activations within the blocks, but recompute them in the backward."""

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        tokens: int = 24,
        vocabulary: int = 61,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialise)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, vocabulary)
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def gpt_loss(models: Models, batch: Batch) -> tuple[Tensor, Any]:
    """The loss over the tokens that are not padding (-100)."""
    ids, targets = batch
    total = F.cross_entropy(models[0](ids).flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=-100)
    return total, (targets != -100).sum()


def gpt_data() -> TensorDataset:
    g = generator()
    ids = torch.randint(61, (33, 25), generator=g)
    targets = ids[:, 1:].clone()
    for row, length in enumerate(torch.randint(5, 25, (33,), generator=g).tolist()):
        targets[row, length:] = -100
    return TensorDataset(ids[:, :-1].clone(), targets)


GPT = Job(seeded(lambda: [Gpt()]), gpt_data, (gpt_loss,), batch=8)

# --- two models and two optimizers


def judged(models: Models, pictures: Tensor, real: float) -> Tensor:
    logits = models[0](pictures)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="sum")


def telling_loss(models: Models, batch: Batch) -> tuple[Tensor, Any]:
    real, noise = batch
    return judged(models, real, 1.0) + judged(models, models[1](noise).detach(), 0.0), len(real)


def fooling_loss(models: Models, batch: Batch) -> tuple[Tensor, Any]:
    return judged(models, models[1](batch[1]), 1.0), len(batch[1])


def gan_data() -> TensorDataset:
    g = generator()
    return TensorDataset(torch.randn(45, 32, generator=g), torch.randn(45, 8, generator=g))


def gan() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)),
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32)),
    ]


GAN = Job(seeded(gan), gan_data, (telling_loss, fooling_loss), batch=16)


# --- under Paceline


def ours(run: paceline.Run, job: Job, way: Way, plant: Callable[[int, Models], None] = lambda *_: None) -> Any:
    """(models, order, losses) after training under an open run. Calls plant(step, models) after each backward.

    losses: of the first model on this process, one per optimizer step."""
    models = job.make()
    optimizers = [OPTIMIZERS[way.optimizer](model.parameters()) for model in models]
    run.prepare(*models, *optimizers)
    loader = run.loader(job.data(), global_batch=job.batch, micro_batch=way.micro_batch, shuffle=True)
    order: Order = [[]]
    losses: list[Any] = []
    for _ in run.epochs(way.epochs):
        for batch in loader:
            order[-1].append(list(loader.indices))
            acted = False
            for number, (loss_fn, optimizer) in enumerate(zip(job.losses, optimizers, strict=True)):
                only = {"optimizer": optimizer} if len(optimizers) > 1 else {}
                loss = backward(run, loss_fn, models, batch, way, only)
                plant(len(order) - 1, models)
                acted = run.step(optimizer, max_grad_norm=way.clip)
                losses += [loss] if number == 0 else []
            if acted:
                order.append([])
    return models, order[:-1], losses


def backward(run: paceline.Run, loss_fn: Loss, models: Models, batch: Any, way: Way, only: dict[str, Any]) -> Tensor:
    """One backward, in the form of the way."""

    def given(of: Any, part: Any) -> Any:
        total, count = loss_fn(of if isinstance(of, tuple) else (of,), part)
        if way.count == "mean":
            return total / count
        return paceline.Total(total, int(count) if way.count == "int" else count)

    if way.form == "closure":
        return run.forward_backward(given, tuple(models) if len(models) > 1 else models[0], batch, **only)
    total, count = loss_fn(models, batch)
    if way.count == "mean":
        run.backward(total / count, **only)
    else:
        run.backward(total=total, count=int(count) if way.count == "int" else count, **only)
    return total.detach() / count


# --- plainly


def plain_order(job: Job, epochs: int) -> Order:
    """The examples in the order of the data set, with the number of steps of a shuffled run."""
    length = len(job.data())
    return [[list(range(i, min(i + job.batch, length)))] for _ in range(epochs) for i in range(0, length, job.batch)]


class Plainly:
    """The parts of a plain loop: models on a device, their optimizers, autocast and a scaler."""

    def __init__(self, job: Job, way: Way, device: torch.device) -> None:
        self.models = [model.to(device) for model in job.make()]
        if way.precision == "bf16-params":
            self.models = [model.bfloat16() for model in self.models]
        if way.channels_last:
            self.models = [model.to(memory_format=torch.channels_last) for model in self.models]
        self.optimizers = [OPTIMIZERS[way.optimizer](model.parameters()) for model in self.models]
        self.scaler = torch.amp.GradScaler(device.type, enabled=way.precision == "fp16")
        self._device, self._dtype, self._clip = device, DTYPES[way.precision], way.clip

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)

    def update(self, which: int) -> None:
        """Update one optimizer from the current gradients."""
        self.scaler.unscale_(self.optimizers[which])
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.models[which].parameters(), self._clip)
        self.scaler.step(self.optimizers[which])


@contextmanager
def without_tf32() -> Iterator[None]:
    """A context without TF32, as on Paceline's side (tf32=False). torch allows TF32 in convolutions by default."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def plain(job: Job, way: Way, order: Order, device: torch.device, left_out: Sequence[int] = ()) -> list[nn.Module]:
    """The models after a plain loop over the same examples, without TF32. left_out: the steps without an update.

    Raises CheckFault if the plain loop fails."""
    try:
        with without_tf32():
            return _plain(job, way, order, device, left_out)
    except Exception as error:
        raise CheckFault(f"the plain loop: {type(error).__name__}: {error}") from error


def check_repeats(job: Job, way: Way, order: Order, device: torch.device, theirs: Models) -> None:
    """Raises CheckFault if two runs of the plain loop differ by more than the limit for ours."""
    control = apart(plain(job, way, order, device), theirs, job.make())
    if not control <= limit(way.precision):
        raise CheckFault(f"{way}: the plain loop differs from itself by {control:.1e}")


def _plain(job: Job, way: Way, order: Order, device: torch.device, left_out: Sequence[int]) -> list[nn.Module]:
    loop = Plainly(job, way, device)
    models = loop.models
    columns = [column.to(device) for column in job.data().tensors]
    for number, parts in enumerate(order):
        batches = [[column[part] for column in columns] for part in parts]
        for model in models:
            model.zero_grad()
        for which, loss_fn in enumerate(job.losses):
            loop.optimizers[which].zero_grad()
            whole = sum(map(len, parts)) if way.count == "mean" else sum(counted(job, batch) for batch in batches)
            for batch in batches:
                with loop.autocast():
                    total, _ = loss_fn(models, batch)
                loop.scaler.scale(total / whole).backward(inputs=list(models[which].parameters()))
            if number not in left_out:
                loop.update(which)
        if number not in left_out:
            loop.scaler.update()
    return models


def counted(job: Job, batch: Batch) -> Any:
    """The count of a loss in a batch: tokens for the transformer, otherwise examples."""
    return (batch[1] != -100).sum() if job.losses[0] is gpt_loss else len(batch[0])


# --- compared


LIMIT = 1e-4


def limit(precision: str) -> float:
    """The largest allowed difference between ours and a plain loop (see `apart`).

    fp32, without TF32: they differ by the rounding of sums (Paceline multiplies a loss by its weight, the plain loop
    divides): 1e-7 per step, which training amplifies somewhat.

    16 bits: they run the same kernels, but scale a mean or split a batch differently. This moves roundings of at most
    half the dtype's epsilon: 4 epsilon in total, 3e-2 for bf16 and 4e-3 for fp16. A plain loop in 16 bits differs by as
    much from a loop in fp32 (0.005 to 0.043 for bf16 here), and one lost example makes a larger difference (0.09). With
    16-bit weights each update rounds once more: twice that.
    """
    if precision == "fp32":
        return LIMIT
    return (8 if precision == "bf16-params" else 4) * torch.finfo(DTYPES[precision]).eps


def apart(ours: Models, theirs: Models, start: Models) -> float:
    """The difference of all weights, relative to their change in training (see `share`)."""
    return share(*map(weights, (ours, theirs, start)))


def share(ours: Sequence[Tensor], theirs: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """||ours - theirs|| / ||theirs - start||."""
    away = moved = 0.0
    for three in zip(ours, theirs, start, strict=True):
        a, b, c = (tensor.detach().double().cpu() for tensor in three)
        away += float((a - b).square().sum())
        moved += float((b - c).square().sum())
    return (away / moved) ** 0.5 if moved else float("inf")


def weights(models: Models) -> list[Tensor]:
    return [tensor for model in models for tensor in (*model.parameters(), *floating_buffers(model))]


def floating_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def same_bits(ours: Models, theirs: Models) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(weights(ours), weights(theirs), strict=True))
