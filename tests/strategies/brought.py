"""Models as people bring them, for tests of `tensor` and `pipeline`: keyword arguments, a mask, labels, an object as
output, tied embeddings, q, k and v as one layer, one layer that is called many times, grouped convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.strategies import checks
from tests.strategies.checks import started
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline

VOCABULARY, LENGTH, WIDTH, N, BATCH, EPOCHS = 12, 6, 8, 10, 4, 1  # a last global batch of 2


class Sentences(Dataset[Any]):
    """Token ids of several lengths, padded, as dicts."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, VOCABULARY, (N, LENGTH), generator=g)
        self.lengths = torch.randint(3, LENGTH + 1, (N,), generator=g)
        self.lengths[4:8] = LENGTH  # a batch without padding, for which the models take another way

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        mask = torch.arange(LENGTH) < self.lengths[i]
        ids = torch.where(mask, self.ids[i], 0)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    note: str = "scores"


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as OpenAI's GPT-2 has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class FusedAttention(nn.Module):
    def __init__(self, heads: int, how: str) -> None:
        super().__init__()
        self.num_heads, self.how = heads, how
        kind: Callable[[int, int], nn.Module] = Conv1D if how == "split" else lambda o, i: nn.Linear(i, o)
        self.c_attn, self.c_proj = kind(3 * WIDTH, WIDTH), kind(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        shape = (b, t, self.num_heads, WIDTH // self.num_heads)
        if self.how == "view":
            q, k, v = self.c_attn(x).view(b, t, 3, *shape[2:]).unbind(2)
        elif self.how == "whole":  # another function of q, k and v side by side
            q, k, v = ((self.c_attn(x) * 0.5)[..., i * WIDTH : (i + 1) * WIDTH].view(shape) for i in range(3))
        else:
            q, k, v = (part.view(shape) for part in self.c_attn(x).split(WIDTH, dim=2))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        causal = torch.ones(t, t).tril().bool() if mask is None else torch.ones(t, t).tril().bool() & mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = Conv1D(16, WIDTH), Conv1D(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.gelu(self.enter(x)))


class DecoderBlock(nn.Module):
    def __init__(self, heads: int, how: str) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.inner = FusedAttention(heads, how), Inner()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        x = x + self.attn(self.ln_1(x), attention_mask)
        return x + self.inner(self.ln_2(x)), None


class Decoder(nn.Module):
    """As GPT-2: everything by keyword, a mask that is made by values, a head tied to the embedding, an object."""

    def __init__(self, heads: int = 2, how: str = "split") -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([DecoderBlock(heads, how) for _ in range(3)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Output:
        assert input_ids is not None
        positions = torch.arange(input_ids.shape[1])
        x = self.wte(input_ids) + self.wpe(positions)
        mask = None
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool()[:, None, None, :] | torch.eye(len(positions)).bool()
        for block in self.h:
            x, _ = block(x, attention_mask=mask)
        return scored(self.lm_head(self.ln_f(x)), labels)


def scored(logits: Tensor, labels: Tensor | None) -> Output:
    loss = None
    if labels is not None:
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
    return Output(loss, logits)


class Seeing(nn.Module):
    """A layer without parameters, which makes a mask of the examples alone."""

    def forward(self, attention_mask: Tensor) -> Tensor:
        return attention_mask.bool()[:, None, None, :] | torch.eye(attention_mask.shape[1]).bool()


class Repeated(nn.Module):
    """As ALBERT: one layer that is called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.seeing = Seeing()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = DecoderBlock(2, "split")
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids) * 0.3
        mask = self.seeing(attention_mask)
        for _ in range(4):
            x, _ = self.layer(x, attention_mask=mask)
        return scored(self.head(x), labels)


def halves(groups: int = 2) -> nn.Module:
    """As AlexNet: grouped convolutions, one after a full one, and two with nothing but an activation between them."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)),
        nn.Conv2d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding="same", groups=groups),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 2, groups=groups, bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1, groups=groups),
        nn.Flatten(),
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


def images() -> TensorDataset:
    g = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(N, 32, generator=g, dtype=torch.float64), torch.randint(3, (N,), generator=g))


def by_the_model(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    count = (batch["labels"][:, 1:] != -100).sum()
    return paceline.Total(model(**batch).loss * count, count)


def by_logits(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    keep = batch["labels"] != -100
    return paceline.Total(F.cross_entropy(logits[keep], batch["labels"][keep], reduction="sum"), keep.sum())


def by_class(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


Build = Callable[[], nn.Module]


def make(build: Build, adam: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    return checks.make(build, adam)


def plainly(build: Build, loss_fn: Any, adam: bool = False) -> nn.Module:
    rows = images() if loss_fn is by_class else Sentences()
    return checks.plainly(build, loss_fn, adam, given=rows, epochs=EPOCHS, batch=BATCH)


def trained(
    build: Build, loss_fn: Any, strategy: Any, *, adam: bool = False, micro: int | None = None, loop: bool = False
) -> nn.Module:
    rows = images() if loss_fn is by_class else Sentences()
    return checks.under_paceline(
        build,
        loss_fn,
        strategy=strategy,
        adam=adam,
        micro=micro,
        closure=not loop,
        given=rows,
        epochs=EPOCHS,
        batch=BATCH,
    )


def sized(name: str) -> str:
    """With parts of two processes."""
    return f"{name}:{'size' if name == 'tensor' else 'stages'}=2"


def refused(build: Build, loss_fn: Any, strategy: Any, kind: type[Exception], *words: str) -> None:
    """At `prepare`, or at the first batch, before anything was updated."""
    try:
        trained(build, loss_fn, strategy)
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)


# --- pipeline


class Optional(nn.Module):
    """torch.fx can read it as long as the mask is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.last = nn.Linear(32, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x)


def with_mask(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], mask=batch[0] > 0), batch[1])


class Noisy(Repeated):
    """Draws in the model's own code, before its first layer."""

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        self.seen = torch.where(torch.rand(input_ids.shape) < 0.3, 1, input_ids)
        return super().forward(input_ids=self.seen, attention_mask=attention_mask, labels=labels)


def noisy(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Draws in the closure too."""
    swapped = torch.where(torch.rand(batch["input_ids"].shape) < 0.3, 2, batch["input_ids"])
    return by_logits(model, {**batch, "input_ids": swapped})


class Reading(Repeated):
    """Decides by what a layer gives."""

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        x, _ = self.layer(x)
        return scored(self.head(x if x.sum() > 0 else -x), labels)


class Writing(Repeated):
    """Writes what a layer gives into a tensor that was there before."""

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        x = torch.zeros(*input_ids.shape, WIDTH, dtype=torch.float64)
        x[:] = self.embed(input_ids)
        return scored(self.head(self.layer(x)[0]), labels)


def penalized(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    logits = model(**batch).logits
    return torch.autograd.grad(logits.sum(), [model.embed.weight], create_graph=True)[0].square().mean()


def decayed(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Reads all weights in the closure: every stage must have what it reads."""
    total = by_logits(model, batch)
    return total, sum(p.square().sum() for p in model.parameters()) * 1e-3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x) * self.scale


def saved(folder: str, strategy: str) -> None:
    """Trains the decoder for an epoch and saves it."""
    with started(strategy=strategy) as run:
        model, optimizer = run.prepare(*make(Decoder, True))
        for _ in run.epochs(1):
            for batch in run.loader(Sentences(), global_batch=BATCH):
                run.forward_backward(by_logits, model, batch)
                run.step(optimizer)
        run.save(Path(folder))
