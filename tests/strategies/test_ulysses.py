"""`ulysses` on several processes, against plain PyTorch on whole sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.strategies.checks import (
    Net,
    X,
    Y,
    adamw,
    compare_checkpoints,
    make,
    one_head,
    plainly,
    refused,
    same,
    started,
    under_paceline,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import ModelError, SettingError
from paceline.strategies.sequence import sequence_cut, sequence_shard
from paceline.strategies.sequence.sequence_shard import SequenceShard, even_cut, whole

assert sequence_cut.RULE_MODULES  # imported, so that the rules are registered

T = 7  # tokens: no multiple of a number of processes


class Block(nn.Module):
    """Written for one device, with the usual idioms."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width), nn.Dropout(dropout))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        width = 2 * heads
        self.tokens, self.positions = nn.Embedding(11, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Frames(nn.Module):
    """Reads vectors, mixes neighbours by a convolution, and pools in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mix, self.out = nn.Linear(3, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)
        return self.out(h.mean(1) + h[:, 0] + h.amax(1))


G = torch.Generator().manual_seed(5)
IDS = torch.randint(11, (21, T), generator=G)  # in global batches of 5 the last one has 1 example
VECTORS = torch.randn(21, T, 3, generator=G, dtype=torch.float64)
CLASSES = torch.randint(3, (21,), generator=G)


def next_token(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (ids,) = batch
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))


def by_token(model: nn.Module, batch: list[Tensor]) -> Any:
    """A sum over some tokens, written without a criterion's mean."""
    (ids,) = batch
    chosen = ids > 3
    losses = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
    return paceline.Total((losses * chosen).sum(), chosen.sum())


def classes(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def strategies() -> list[str]:
    if dist.get_world_size() == 2:
        return ["ulysses", "fsdp+ulysses:min_params=0"]
    return ["ulysses:size=2", "ulysses", "fsdp+ulysses:size=2,min_params=0"]


@pytest.mark.ranks(2, conformance=4)
def test_a_decoder_trains_as_plain_pytorch() -> None:
    given = TensorDataset(IDS)
    for strategy in strategies():
        for loss, micro, closure in ((next_token, None, True), (by_token, 2, False)):
            ours = under_paceline(
                GPT, loss, strategy=strategy, adam=True, micro=micro, closure=closure, given=given, clip=0.3
            )
            same(ours, plainly(GPT, loss, adam=True, given=given, clip=0.3))


@pytest.mark.ranks(2)
def test_a_decoder_is_nowhere_computed_on_whole_sequences() -> None:
    """Neither by the strategy nor by FSDP2, which looks at the outputs of layers."""
    for strategy in strategies():
        sequence_shard._warned.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            under_paceline(GPT, next_token, strategy=strategy, given=TensorDataset(IDS))
        assert not [str(one.message) for one in said if "ulysses" in str(one.message) or "view" in str(one.message)]
        assert not sequence_shard._warned


@pytest.mark.ranks(conformance=4)
def test_sequences_over_four_and_two_sharded_replicas() -> None:
    strategy = "fsdp+ulysses:stage=2,replicate=2,checkpointing=true,wrap=Block,min_params=0"
    given = TensorDataset(IDS)
    ours = under_paceline(GPT, next_token, strategy=strategy, adam=True, micro=2, given=given, clip=0.3)
    same(ours, plainly(GPT, next_token, adam=True, given=given, clip=0.3))


@pytest.mark.ranks(2, conformance=4)
def test_heads_that_do_not_divide_and_mixed_tokens_are_exact() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # conv1d and amax on whole sequences
        for build, loss, given in (
            (lambda: GPT(heads=3), next_token, TensorDataset(IDS)),
            (Frames, classes, TensorDataset(VECTORS, CLASSES)),
        ):
            for strategy in strategies():
                ours = under_paceline(build, loss, strategy=strategy, adam=True, given=given)
                same(ours, plainly(build, loss, adam=True, given=given))


@pytest.mark.ranks(conformance=2)
def test_checkpoints_are_those_of_ddp() -> None:
    compare_checkpoints(Net, one_head, ["ulysses", "fsdp+ulysses:min_params=0"], optimizer=adamw)


# ------------------------------------------------------------ each rule

W = torch.randn(6, 6, generator=G, dtype=torch.float64)
GAINS = torch.rand(6, generator=G, dtype=torch.float64)
OTHER = torch.randn(2, T, 6, generator=G, dtype=torch.float64)
LABELS = torch.randint(6, (2, T), generator=G)
LABELS[0, 1] = LABELS[1, 5] = -100
MASK = torch.rand(2, 1, T, T, generator=G) < 0.6
MASK |= torch.eye(T, dtype=torch.bool)


def heads(x: Tensor) -> Tensor:
    return torch.cat([x, x.flip(-1) * 2], -1).view(2, T, 4, 3).transpose(1, 2)


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: torch.where(x > 0, x * OTHER + 1, 2 / (x.exp() + OTHER[:, :, :1])).clamp(max=3) - GAINS,
    "reversed": lambda x: 1 - OTHER * x + (2**x).to(torch.float64),
    "in place": lambda x: (x * 1).mul_(OTHER).add_(x).masked_fill_(MASK[:, 0, :, :1], 0.5),
    "augmented": lambda x: [y := x * 2, y.__iadd__(OTHER)][1],
    "norms": lambda x: F.layer_norm(x, (6,), GAINS) + F.rms_norm(x, (6,)) + F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(2) + x.cumsum(-1),
    "softmax over tokens": lambda x: x.softmax(1),
    "sums": lambda x: x.sum() * x.mean((1, 2), keepdim=True) + x.mean(1, keepdim=True) + x.sum(-1, keepdim=True),
    "largest": lambda x: x.max(-1).values + x.topk(2, -1)[0].sum(-1) + x.amax(1, keepdim=True).sum(-1),
    "products": lambda x: (F.linear(x, W, GAINS) @ W) @ x.transpose(1, 2).matmul(OTHER),
    "addmm": lambda x: torch.addmm(GAINS, x.view(-1, 6), W).view(2, T, 6),
    "scores": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "merged": lambda x: (x.reshape(-1, 6) * OTHER.reshape(-1, 6)).view(2, T, 2, 3).flatten(2).unflatten(-1, (3, -1)),
    "moved": lambda x: x.permute(2, 0, 1).unsqueeze(1).squeeze(1).movedim(0, -1).mT.expand(3, 2, 6, T)[1],
    "repeated": lambda x: x[:, None].expand(2, 3, T, 6).reshape(6, T, 6).repeat(1, 1, 2).repeat_interleave(2, -1),
    "slices": lambda x: x[:, 1:-1, ::2] * x[:, 2:, :3] + x[:, :1, :3] + x[:, 3, None, :3] + x[:, 2:, -1:],
    "many slices": lambda x: x[:, 2:][:, 1:3][:, :, None, 1],
    "parts": lambda x: torch.stack([*x.chunk(3, -1)], 1).sum(1) + torch.cat(x.split([2, 4], -1)[::-1], 2)[..., :2],
    "joined tokens": lambda x: torch.cat([x[:, 3:], x[:, :3]], 1),
    "by mask": lambda x: x[LABELS > 2],
    "padding": lambda x: F.pad(x, (1, 2)).sum(-1) + F.pad(x, (0, 0, 1, 0))[:, :-1].sum(-1),
    "unknown": lambda x: F.conv1d(x.transpose(1, 2), W[:, :, None].expand(6, 6, 3), padding=1),
    "loops": lambda x: sum(row.sum(-1) for row in x),
    "written": lambda x: torch.einsum("btd,de->bte", x, W),
    "causal": lambda x: F.scaled_dot_product_attention(heads(x), heads(x) + 1, heads(x.tanh()), is_causal=True),
    "masked": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), MASK, scale=0.7),
    "mask by head": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), MASK & (torch.arange(4)[None, :, None, None] + torch.eye(T) > 0)
    ),
    "one key head": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x)[:, :1], heads(x)[:, 1:2], is_causal=True, enable_gqa=True
    ),
    "two key heads": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x)[:, :2], heads(x)[:, 2:], MASK, enable_gqa=True
    ),
    "three heads": lambda x: F.scaled_dot_product_attention(
        heads(x)[:, :3], heads(x)[:, 1:], heads(x)[:, 1:], is_causal=True
    ),
    "other keys": lambda x: F.scaled_dot_product_attention(heads(x), heads(OTHER), heads(OTHER)),
    "cross-entropy": lambda x: F.cross_entropy(x.view(-1, 6), LABELS.view(-1), label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, weight=GAINS) + F.cross_entropy(
        x[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    ),
    "likelihoods": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), LABELS.flatten(), reduction="none"),
    "checkpointed": lambda x: checkpoint(lambda y: y.tanh() * y.softmax(1), x, use_reentrant=False),
    "dropout": lambda x: [torch.manual_seed(3), F.dropout(x, 0.4) + F.dropout(x.mT, 0.2).mT][1],
    "frozen": lambda x: x.detach() * x + (x.detach() > 0).sum() * x,
}  # fmt: skip


def compare_operation(operation: Callable[[Tensor], Any]) -> None:
    """Values, and gradients: those of the processes add up to the gradients of the whole."""
    x = torch.randn(2, T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, cut = x.clone().requires_grad_(), even_cut(world_group(), T)
    leaf = cut.part(x, 1).clone().requires_grad_()
    expected, result = operation(plain), operation(SequenceShard(leaf, 1, cut))
    assert tuple(result.shape) == tuple(expected.shape)
    torch.testing.assert_close(
        whole(result) if isinstance(result, SequenceShard) else result, expected, rtol=1e-12, atol=1e-12
    )
    factor = torch.linspace(0.5, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * factor).sum().backward()
    ((result * factor).sum() / world_group().size).backward()
    assert plain.grad is not None
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, cut.part(plain.grad, 1), rtol=1e-12, atol=1e-12)


ON_WHOLE = {
    "softmax over tokens", "largest", "products", "joined tokens", "by mask", "padding", "unknown", "written",
    "checkpointed",
}  # fmt: skip
"""Cases with an operation that each process computes on the whole sequence."""


@pytest.mark.ranks(2, conformance=(3, 4))
def test_each_operation_is_that_on_whole_sequences() -> None:
    failed, on_whole = [], set()
    compute = sequence_shard.on_whole
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations on whole sequences
        for name, operation in OPERATIONS.items():

            def on_whole_noted(*arguments: Any, name: str = name) -> Any:
                on_whole.add(name)
                return compute(*arguments)

            patch.setattr(sequence_shard, "on_whole", on_whole_noted)
            try:
                compare_operation(operation)
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    assert on_whole == ON_WHOLE, on_whole ^ ON_WHOLE


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].expand(ctx.shape)


@pytest.mark.ranks(2)
def test_what_would_be_wrong_is_refused() -> None:
    cut = even_cut(world_group(), T)

    def shard() -> Any:
        return SequenceShard(cut.part(OTHER, 1).clone().requires_grad_(), 1, cut)

    q = heads(OTHER)
    for words, wrong in (
        ("a torch.autograd.Function got", lambda: Doubled.apply(shard()) + 1),
        ("autograd.Function", lambda: Summed.apply(shard()).backward()),
        ("use_reentrant=False", lambda: checkpoint(torch.tanh, shard(), use_reentrant=True) + 1),
        ("dropout_p > 0", lambda: F.scaled_dot_product_attention(heads(shard()), q, q, dropout_p=0.1)),
        ("writes in place", lambda: (shard() * 1).__setitem__((slice(None), 0), 1.0)),
        ("writes in place", lambda: (shard() * 1).cumsum_(1)),
        ("bypasses torch's functions", lambda: torch.func.vmap(torch.sin)(shard())),
    ):
        refused(ModelError, words, wrong)
    try:
        (shard() * 1)[:, 0].zero_()
    except RuntimeError as error:
        assert "modified inplace" in str(error)
    else:
        raise AssertionError("a write to a view would be lost")


@pytest.mark.ranks(2)
def test_models_and_settings_that_cannot_work_are_refused() -> None:
    def trained(build: Callable[[], nn.Module], strategy: str = "ulysses") -> None:
        given = TensorDataset(X, Y)
        under_paceline(build, lambda m, b: F.cross_entropy(m(b[0]), b[1]), strategy=strategy, given=given)

    def flat() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3))

    refused(ModelError, "no input of the model could be split", lambda: trained(flat))
    refused(SettingError, "size=1", lambda: trained(flat, "ulysses:size=1"))
    refused(SettingError, "size=3", lambda: trained(flat, "ulysses:size=3"))

    def compiled() -> None:
        with started(strategy="ulysses") as run:
            run.prepare(torch.compile(flat()))

    refused(ModelError, "compiled by torch.compile", compiled)


@pytest.mark.ranks(2)
def test_evaluation_gives_whole_outputs() -> None:
    with started(strategy="ulysses") as run:
        model, _ = run.prepare(*make(GPT, True))
        model.eval()
        with torch.no_grad():
            found = model(IDS)
        assert type(found) is Tensor
        same_model, _ = make(GPT, True)
        torch.testing.assert_close(found, same_model.eval()(IDS), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_activations_are_divided() -> None:
    """The bytes that autograd keeps for the backward, apart from weights."""
    ids = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(2))

    def kept(model: nn.Module) -> int:
        held: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = next_token(model, [ids])
        loss.backward()
        return sum(held.values())

    plain = kept(make(GPT, True)[0])
    with started(strategy="ulysses") as run:
        model, _ = run.prepare(*make(GPT, True))
        ours = kept(model)
    assert ours <= 0.6 * plain, (ours, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("precision", "bar"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_fit_evaluate_and_predict_as_plain_pytorch(precision: str, bar: float) -> None:
    data = TensorDataset(IDS)

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = GPT()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    plain, optimizer = built()
    for ids in IDS.split(7) * 2:
        optimizer.zero_grad()
        with autocast():
            loss = next_token(plain, [ids])
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad(), autocast():
        expected, scores = next_token(plain, [IDS]).item(), plain(IDS).float()

    for strategy in strategies():
        model, optimizer = built()
        with started(strategy=strategy, precision=precision, progress="off") as run:
            history = paceline.fit(
                model,
                next_token,
                data,
                optimizer=optimizer,
                global_batch=7,
                shuffle=False,
                epochs=2,
                run=run,
                evaluate_on=data,
                max_grad_norm=0.5,
            ).history
            found = run.predict(model, data, global_batch=5, fn=lambda m, batch: m(batch[0]))
        assert abs(history["val_loss"][-1] - expected) < bar * expected
        if dist.get_rank() == 0:
            torch.testing.assert_close(found.float(), scores, rtol=0, atol=5 * bar)
