"""Batches of 0 rows: do torch's functions support empty shards, in fp32 and in 16 bits?

Each function computes a batch of two rows and an empty batch, as in a training step: forward, then the backward of the
output's sum. For the empty batch the output must have the same shape with 0 rows, and every parameter must get a
gradient of zeros. The dtype may differ: cuDNN's recurrent layers return float16 under any autocast, and are not called
without rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.check import Place, Steps, check
from torch import Tensor, nn

from paceline.data.zero_rows import ZERO_ROWS

Case = tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]
"""(a module, makes the inputs of a batch with a number of rows)."""


class Calls(nn.Module):
    """A module that calls a function with the inputs and then parameters of these shapes."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.given = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.given)


class FirstOf(nn.Module):
    """The first output of a module that returns a tuple. recurrent: the rows are the second dimension."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)[0]


class Attention(nn.Module):
    """scaled_dot_product_attention of projections, as transformers write it."""

    def __init__(self, mask: str = "", grouped: bool = False, **options: Any) -> None:
        super().__init__()
        self.heads, self.groups = 4, 2 if grouped else 4
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 8 * self.groups)
        self.bias = nn.Parameter(torch.zeros(4, 5, 5)) if mask == "learned" else None
        self.mask, self.options = mask, options | ({"enable_gqa": True} if grouped else {})

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, 8)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.groups, 8)).transpose(1, 2)
        mask: Tensor | None = None
        if self.mask == "learned":
            assert self.bias is not None
            mask = self.bias.to(query.dtype)
        elif self.mask == "padding":
            mask = torch.ones(x.size(0), 1, 1, x.size(1), dtype=torch.bool, device=x.device)
        made = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, **self.options)
        return made.transpose(1, 2).reshape(*x.shape[:-1], -1)


def rows(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: (torch.randn(n, *shape, requires_grad=True),)


def ids(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: (torch.randint(7, (n, *shape)),)


def many(*makers: Callable[[int], tuple[Tensor, ...]]) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: tuple(tensor for make in makers for tensor in make(n))


def cases() -> dict[str, Case]:
    """Cases for each kind of function that models call."""
    tokens, image, wide = rows(5, 32), rows(8, 6, 6), rows(32)
    found: dict[str, Case] = {
        "attention": (Attention(), tokens),
        "attention, causal": (Attention(is_causal=True), tokens),
        "attention with a padding mask": (Attention("padding"), tokens),
        "attention with a learned mask": (Attention("learned"), tokens),
        "attention with dropout": (Attention(dropout_p=0.1), tokens),
        "attention of grouped queries": (Attention(grouped=True, is_causal=True), tokens),
        "MultiheadAttention": (FirstOf(Same(nn.MultiheadAttention(32, 4, batch_first=True))), tokens),
        "TransformerEncoderLayer": (nn.TransformerEncoderLayer(32, 4, 32, batch_first=True), tokens),
        "TransformerDecoderLayer": (
            nn.TransformerDecoderLayer(32, 4, 32, batch_first=True),
            many(tokens, rows(3, 32)),
        ),
        "LSTM": (FirstOf(nn.LSTM(32, 8, 2, batch_first=True)), tokens),
        "GRU": (FirstOf(nn.GRU(32, 8, batch_first=True, bidirectional=True)), tokens),
        "RNN": (FirstOf(nn.RNN(32, 8, batch_first=True)), tokens),
        "LSTMCell": (FirstOf(nn.LSTMCell(32, 8)), wide),
        "Embedding": (nn.Embedding(7, 8, padding_idx=0), ids(5)),
        "EmbeddingBag": (nn.EmbeddingBag(7, 8), ids(5)),
        "MaxPool2d": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)), image),
        "AvgPool2d": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.AvgPool2d(2)), image),
        "AdaptiveAvgPool2d": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)), image),
        "AdaptiveMaxPool2d": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.AdaptiveMaxPool2d(2)), image),
        "Conv1d": (nn.Conv1d(8, 8, 3), rows(8, 6)),
        "Conv2d": (nn.Conv2d(8, 8, 3, padding=1), image),
        "Conv2d, grouped and dilated": (nn.Conv2d(8, 8, 3, groups=4, dilation=2), image),
        "Conv2d, depthwise": (nn.Conv2d(8, 8, 3, groups=8), image),
        "Conv3d": (nn.Conv3d(2, 4, 3), rows(2, 4, 4, 4)),
        "ConvTranspose2d": (nn.ConvTranspose2d(8, 4, 2, stride=2), image),
        "Unfold": (nn.Sequential(nn.Conv2d(8, 8, 1), nn.Unfold(2)), image),
        "PixelShuffle": (nn.Sequential(nn.Conv2d(8, 8, 1), nn.PixelShuffle(2)), image),
        "Upsample, bilinear": (nn.Sequential(nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=2, mode="bilinear")), image),
        "Upsample, nearest": (nn.Sequential(nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=2)), image),
        "grid_sample": (
            Calls(lambda x, w: F.grid_sample(x * w, x[:, :2].permute(0, 2, 3, 1), align_corners=False), (1,)),
            image,
        ),
        "LayerNorm": (nn.LayerNorm(32), tokens),
        "RMSNorm": (nn.RMSNorm(32), tokens),
        "GroupNorm": (nn.GroupNorm(2, 8), image),
        "InstanceNorm2d": (nn.InstanceNorm2d(8, affine=True), image),
        "LocalResponseNorm": (nn.Sequential(nn.Conv2d(8, 8, 1), nn.LocalResponseNorm(2)), image),
        "Linear": (nn.Linear(32, 8), tokens),
        "Bilinear": (nn.Bilinear(32, 32, 8), many(wide, wide)),
        "PReLU": (nn.PReLU(), tokens),
        "GLU": (nn.Sequential(nn.Linear(32, 8), nn.GLU()), tokens),
        "softmax": (nn.Sequential(nn.Linear(32, 8), nn.Softmax(-1)), tokens),
        "log_softmax": (nn.Sequential(nn.Linear(32, 8), nn.LogSoftmax(-1)), tokens),
        "gelu, silu, dropout": (nn.Sequential(nn.Linear(32, 8), nn.GELU(), nn.SiLU(), nn.Dropout()), tokens),
        "view": (Calls(lambda x, w: (x @ w).view(x.size(0), -1), (32, 8)), tokens),
        "flatten": (nn.Sequential(nn.Linear(32, 8), nn.Flatten()), tokens),
        "cat and stack": (Calls(lambda x, w: torch.stack([torch.cat([x, x * w], -1)] * 2, 1), (32,)), tokens),
        "einsum": (Calls(lambda x, w: torch.einsum("btc,cd->bdt", x, w), (32, 8)), tokens),
        "bmm": (Calls(lambda x, w: torch.bmm(x, w.expand(x.size(0), -1, -1)), (32, 8)), tokens),
        "cumsum, sort, topk": (
            Calls(lambda x, w: (x * w).cumsum(-1).sort(-1).values.topk(3, -1).values, (32,)),
            tokens,
        ),
        "gather": (Calls(lambda x, w: (x * w).gather(1, torch.zeros_like(x[:, :1], dtype=torch.long)), (32,)), tokens),
        "index_add": (
            Calls(
                lambda x, w: torch.zeros_like(x).index_add(0, torch.arange(x.size(0), device=x.device), x * w), (32,)
            ),
            tokens,
        ),
        "masked mean over tokens": (Calls(lambda x, w: ((x * w) * (x > 0)).sum(1) / (x > 0).sum(1), (32,)), tokens),
        "max over tokens": (Calls(lambda x, w: (x * w).amax(1), (32,)), tokens),
        "std over tokens": (Calls(lambda x, w: (x * w).std(1), (32,)), tokens),
        "logsumexp": (Calls(lambda x, w: (x * w).logsumexp(-1), (32,)), tokens),
        "normalize": (Calls(lambda x, w: F.normalize(x * w, dim=-1), (32,)), tokens),
        "cosine_similarity": (Calls(lambda x, w: F.cosine_similarity(x, w, dim=-1), (32,)), tokens),
        "cdist": (Calls(lambda x, w: torch.cdist(x * w, x * w), (32,)), tokens),
        "rfft": (Calls(lambda x, w: torch.fft.rfft((x * w).float(), dim=-1).abs(), (32,)), tokens),
        "pad, roll, flip": (Calls(lambda x, w: F.pad(x * w, (1, 1)).roll(1, 1).flip(1), (32,)), tokens),
        "one_hot": (Calls(lambda i, w: F.one_hot(i, 7).to(w.dtype) @ w, (7, 8)), ids(5)),
        "cross_entropy": (
            Calls(lambda x, w: F.cross_entropy(x @ w, torch.zeros_like(x[:, 0], dtype=torch.long), reduction="none"),
                  (32, 8)),
            wide,
        ),
        "binary_cross_entropy_with_logits": (
            Calls(lambda x, w: F.binary_cross_entropy_with_logits(x @ w, torch.zeros_like(x[:, :8]), reduction="none"),
                  (32, 8)),
            wide,
        ),
        "mse, l1, huber": (
            Calls(lambda x, w: F.mse_loss(x, x.detach() * w, reduction="none")
                  + F.l1_loss(x, x * w, reduction="none") + F.huber_loss(x, x * w, reduction="none"), (32,)),
            wide,
        ),
        "ctc_loss": (
            Calls(lambda x, w: F.ctc_loss((x @ w).transpose(0, 1).float().log_softmax(-1),
                                          torch.ones(x.size(0), 2, dtype=torch.long, device=x.device),
                                          torch.full((x.size(0),), 5), torch.full((x.size(0),), 2), reduction="none"),
                  (32, 8)),
            tokens,
        ),
        "packed GRU": (Packed(), tokens),
    }  # fmt: skip
    return found


class Same(nn.Module):
    """A module of attention, with its input as query, key and value."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x, x, x)


class Packed(nn.Module):
    """A recurrent layer over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.size(0),), x.size(1))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]


def fault(module: nn.Module, inputs: Callable[[int], tuple[Tensor, ...]], place: Place, dtype: torch.dtype) -> str:
    """The problem of this module with an empty batch; "" if there is none."""
    module = module.to(place.device)
    made: dict[int, Any] = {}
    for count in (2, 0):
        module.zero_grad()
        batch = [tensor.detach().to(place.device).requires_grad_(tensor.requires_grad) for tensor in inputs(count)]
        with torch.autocast(place.device.type, dtype, enabled=dtype != torch.float32):
            made[count] = module(*batch)
        if not isinstance(made[count], Tensor):
            return f"the output is {type(made[count]).__name__}"
        made[count].sum().backward()
    if 0 not in made[0].shape or [a for a, b in zip(made[0].shape, made[2].shape, strict=True) if a != b] != [0]:
        return f"the output has the shape {tuple(made[0].shape)}, and {tuple(made[2].shape)} over two rows"
    for name, p in module.named_parameters():
        if p.grad is None:
            return f"{name} has no gradient"
        if bool(p.grad.any()):
            return f"the gradient of {name} is not zero"
    return ""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@check("right", 120)
def batches_of_no_rows(place: Place) -> Steps:
    every = cases()
    yield f"{len(every)} functions over 0 rows, in {', '.join(DTYPES)}, as torch has them and in a step of Paceline"
    left, mended = {}, []
    warnings.simplefilter("ignore")
    for name, (module, inputs) in every.items():
        for precision, dtype in DTYPES.items():
            if precision == "fp16" and place.device.type == "cpu":
                continue
            title = f"{name}, {precision}"
            plain = _told(module, inputs, place, dtype)
            loader = object()
            ZERO_ROWS.begin_yield(loader, empty=True)
            try:
                ours = _told(module, inputs, place, dtype)
            finally:
                ZERO_ROWS.end_yield(loader)
            mended += [f"{title}: {plain}"] * (plain != "" and ours == "")
            left |= {title: ours} if ours else {}
    ZERO_ROWS.close()
    yield {"mended": mended, "left": left}
    unknown = {title: told for title, told in left.items() if title.rpartition(", ")[0] not in REFUSED}
    assert not unknown, "; ".join(f"{title}: {told}" for title, told in unknown.items())


REFUSED = frozenset(("InstanceNorm2d", "rfft", "ctc_loss", "packed GRU", "PixelShuffle"))
"""The functions that torch refuses for empty batches, most of them on CPUs too. If a model uses one, an empty shard
raises an error with the name of the function (`paceline.step.messages.empty_message`)."""


def _told(module: nn.Module, inputs: Callable[[int], tuple[Tensor, ...]], place: Place, dtype: torch.dtype) -> str:
    try:
        return fault(module, inputs, place, dtype)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
