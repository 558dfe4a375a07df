"""Models that fail over a batch of 0 rows, trained with empty shards: against plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies.checks import difference, started
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.data.zero_rows import FUNCTIONS, KEPT, METHODS, ZERO_ROWS, ZeroRows, sizes_of_one_row
from paceline.errors import EmptyShardError

COUNT, BATCH, EPOCHS, LENGTH = 13, 4, 2, 6  # the last global batch has one example
G = torch.Generator().manual_seed(3)
TOKENS = torch.randint(1, 9, (COUNT, LENGTH), generator=G) * (
    torch.arange(LENGTH) < torch.arange(COUNT)[:, None] % 5 + 2
)
LABELS = torch.randint(3, (COUNT,), generator=G)
PLACES = [*((Tensor, name) for name in METHODS), *((where, name) for where, name, _ in FUNCTIONS)]
PLAIN = [getattr(where, name) for where, name in PLACES]


@pytest.fixture(autouse=True)
def _as_torch_has_it() -> None:
    ZERO_ROWS.close()  # after a test whose loader had no run


class Reshaping(nn.Module):
    """Infers sizes in every way: attention as Hugging Face writes it, with a bias that is learned, torch's own with a
    padding mask, a flattening, and a segment that is recomputed in the backward."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.query, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(2, LENGTH, LENGTH))
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout, batch_first=True)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(LENGTH * 8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.attention, self.embed(tokens), use_reentrant=False)
        x = self.layer(x, src_key_padding_mask=tokens == 0)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.reshape(x, (tokens.size(0), -1)))

    def attention(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(*x.shape[:-1], -1, 4).transpose(1, 2)
        made = F.scaled_dot_product_attention(heads, heads, heads, self.bias).transpose(1, 2)
        return x + made.reshape(*x.shape[:-1], -1)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def made(model: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    built = model().double()
    return built, torch.optim.SGD(built.parameters(), lr=0.05, momentum=0.9)


def plainly(model: Callable[[], nn.Module]) -> nn.Module:
    built, optimizer = made(model)
    for _ in range(EPOCHS):
        for start in range(0, COUNT, BATCH):
            loss_fn(built, [TOKENS[start : start + BATCH], LABELS[start : start + BATCH]]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return built


def whole(run: paceline.Run, model: Callable[[], nn.Module]) -> nn.Module:
    """A plain model with the weights of the prepared one. All ranks call it, since slices are made whole for it."""
    found = made(model)[0]
    state = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in run._models[0].state_dict().items()}
    found.load_state_dict(state)
    return found


def in_a_closure(run: paceline.Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.forward_backward(loss_fn, model, batch)
    run.step(optimizer)


def in_the_loop(run: paceline.Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(loss_fn(model, batch))
    run.step(optimizer)


def trained(
    model: Callable[[], nn.Module] = Reshaping, turn: Any = in_a_closure, prepare: Any = None, **settings: Any
) -> nn.Module:
    with started(progress="off", **settings) as run:
        built, optimizer = run.prepare(*made(model))
        if prepare is not None:
            prepare(built)
        loader = run.loader(TensorDataset(TOKENS, LABELS), global_batch=BATCH)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                turn(run, built, optimizer, batch)
        found = whole(run, model)
    assert [getattr(where, name) for where, name in PLACES] == PLAIN
    return found


# --- sizes


@pytest.mark.parametrize(
    ("old", "new", "size"),
    [
        ((0, 3, 4), (0, -1), 12),
        ((0, 5, 8), (0, 5, -1, 4), 2),
        ((7, 0, 4), (-1, 0, 28), 1),
        ((0, 0, 8), (0, 0, 2, -1), 4),
        ((0, 8), (0, 5, -1), 8),  # 0 x 5 rows before
        ((0, 1, 6), (0, 2, -1, 6), 1),
        ((0, 5, 8), (-1, 8), None),  # which torch infers itself, as 0
        ((2, 4), (0, -1), None),
        ((0, 4), (0, 4), None),
        ((0, 4), (-1, -1, 0), None),
        ((0, 4), (0, -2, -1), None),
    ],
)
def test_a_size_is_that_of_one_row(old: tuple[int, ...], new: tuple[int, ...], size: int | None) -> None:
    found = sizes_of_one_row(old, new)
    assert found == (None if size is None else tuple(size if n == -1 else n for n in new))


def test_calls_that_torch_refuses_are_answered_for_some_yields() -> None:
    none, some, changes = torch.empty(0, 3, 4), torch.arange(12.0), ZeroRows()
    calls: list[Callable[[], Tensor]] = [
        lambda: none.view(0, -1),
        lambda: none.view((0, -1)),
        lambda: none.view([0, -1]),
        lambda: none.view(torch.Size([0, -1])),
        lambda: none.view(size=(0, -1)),
        lambda: none.reshape(0, -1),
        lambda: none.reshape(shape=(0, -1)),
        lambda: torch.reshape(none, (0, -1)),
        lambda: torch.reshape(input=none, shape=(0, -1)),
        lambda: none.view(torch.tensor(0), -1),
    ]
    refused: list[Callable[[], Tensor]] = [
        lambda: none.view(5, 7),
        lambda: some.view(5, -1),
        lambda: some[:3].view(torch.complex128),
        lambda: none.view(0, -1, -1),
        lambda: none.max(),
    ]

    def errors() -> list[str]:
        found = []
        for call in refused:
            with pytest.raises(RuntimeError) as raised:
                call()
            found.append(str(raised.value))
        return found

    before = errors()
    changes.begin_yield("one", True)
    assert [tuple(call().shape) for call in calls] == [(0, 12)] * len(calls)
    assert errors() == before
    assert none.view(-1, 4).shape == (0, 4)
    assert some.view(3, -1).tolist() == some.reshape(-1, 4).tolist()
    assert some.view(torch.int32).dtype == torch.int32
    changes.begin_yield("another", True)
    changes.begin_yield("one", False)
    assert torch.reshape(none, (0, -1)).shape == (0, 12)
    changes.begin_yield("another", False)
    for _ in range(KEPT - 2):
        assert none.view(0, -1).shape == (0, 12)
        assert [getattr(where, name) for where, name in PLACES[2:]] == PLAIN[2:]
        changes.begin_yield("one", False)
    assert [getattr(where, name) for where, name in PLACES] == PLAIN
    for call in calls:
        with pytest.raises(RuntimeError, match="ambiguous"):
            call()


def test_sequences_spectra_and_ctc_of_no_rows(request: pytest.FixtureRequest) -> None:
    """The shapes and gradients are those of some rows, without the rows."""
    changes = ZeroRows()
    request.addfinalizer(changes.close)
    layer, window = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), torch.ones(4)

    def recurrent(x: Tensor, sorted_before: bool) -> Tensor:
        lengths = torch.full((len(x),), LENGTH)
        out, (h, c) = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sorted_before))
        padded, found = pad_packed_sequence(out, batch_first=True, total_length=LENGTH)
        assert found.shape == (len(x),)
        return padded + (h + c).sum()

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "sorted": lambda x: recurrent(x, True),
        "in any order": lambda x: recurrent(x, False),
        "rfft": lambda x: torch.fft.rfft(x),
        "rfft2": lambda x: torch.fft.rfft2(x),
        "ifftn": lambda x: torch.fft.ifftn(x, dim=(1, 2)),
        "stft": lambda x: torch.stft(x[:, :, 0], 4, window=window, return_complex=True),
    }
    for how, call in calls.items():
        shape = call(torch.randn(2, LENGTH, 4)).shape
        changes.begin_yield("x", True)
        none = torch.zeros(0, LENGTH, 4, requires_grad=True)
        made = call(none)
        assert made.shape == (0, *shape[1:]), how
        layer.zero_grad()
        made.abs().sum().backward()
        assert none.grad is not None, how
        if "fft" not in how and how != "stft":
            assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
        changes.begin_yield("x", False)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_of_no_rows(reduction: str, request: pytest.FixtureRequest) -> None:
    changes = ZeroRows()
    request.addfinalizer(changes.close)
    changes.begin_yield("x", True)
    scores, none = torch.zeros(LENGTH, 0, 5, requires_grad=True), torch.zeros(0, dtype=torch.long)
    loss = nn.CTCLoss(reduction=reduction)(scores.log_softmax(2), none.view(0, 1), none, none)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert reduction == "none" or loss.isnan() == (reduction == "mean")  # as cross_entropy's
    loss.sum().backward()
    assert scores.grad is not None
    with pytest.raises(RuntimeError):
        F.ctc_loss(torch.zeros(LENGTH, 1, 5), none, none, none)


# --- training


class Speech(nn.Module):
    """A spectrum, packed sequences, a GRU; scores for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(9, 8), nn.GRU(5, 6, batch_first=True), nn.Linear(6, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.fft.rfft(self.embed(tokens)).abs()
        packed = pack_padded_sequence(x, (tokens > 0).sum(1).cpu(), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=LENGTH)
        return self.head(padded).log_softmax(2).transpose(0, 1)


def ctc(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, labels = batch
    lengths = (tokens > 0).sum(1)
    return F.ctc_loss(model(tokens), labels[:, None] + 1, lengths, torch.ones_like(labels))


@pytest.mark.parametrize("turn", ["closure", "loop"])
@pytest.mark.parametrize("strategy", ["single:shards=3", "data_parallel:devices=cpu,cpu,cpu"])
def test_speech_with_an_empty_last_shard(strategy: str, turn: str) -> None:
    """Before: an EmptyShardError that asked to edit the model."""
    if turn == "loop" and strategy != "single:shards=3":
        return

    def made_turn(run: paceline.Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
        if turn == "loop":
            run.backward(ctc(model, batch))
        else:
            run.forward_backward(ctc, model, batch)
        run.step(optimizer)

    plain, by_hand = made(Speech)
    for _ in range(EPOCHS):
        for start in range(0, COUNT, BATCH):
            ctc(plain, [TOKENS[start : start + BATCH], LABELS[start : start + BATCH]]).backward()
            by_hand.step()
            by_hand.zero_grad()
    assert difference(trained(Speech, made_turn, strategy=strategy), plain) <= 1e-10


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "single:shards=3"},
        {"strategy": "data_parallel:devices=cpu,cpu,cpu"},
        pytest.param({"strategy": "mirrored:devices=cpu,cpu"}, marks=pytest.mark.conformance),
        pytest.param({"strategy": "central_storage:devices=cpu,cpu"}, marks=pytest.mark.conformance),
        pytest.param({"reproducible": 4}, marks=pytest.mark.conformance),
        pytest.param({"reproducible": 2, "strategy": "mirrored:devices=cpu,cpu"}, marks=pytest.mark.conformance),
    ],
)
def test_replicas_of_one_process(settings: dict[str, Any]) -> None:
    assert difference(trained(**settings), plainly(Reshaping)) <= 1e-10


@pytest.mark.ranks(2, full=3)
@pytest.mark.parametrize(
    ("strategy", "turn"),
    [
        ("ddp", in_the_loop),
        pytest.param("ddp:reducer=ring", in_a_closure, marks=pytest.mark.conformance),
        ("fsdp", in_the_loop),
        pytest.param("fsdp:stage=1", in_a_closure, marks=pytest.mark.conformance),
        pytest.param("local_sgd:every=1,average_state=true", in_the_loop, marks=pytest.mark.conformance),
        pytest.param(
            "diloco:every=1,outer_lr=1,outer_momentum=0,average_state=true", in_a_closure, marks=pytest.mark.conformance
        ),
    ],
)
def test_processes(strategy: str, turn: Any) -> None:
    assert difference(trained(turn=turn, strategy=strategy), plainly(Reshaping)) <= 1e-10


def normed() -> nn.Module:
    return Reshaping(norm=True)


@pytest.mark.ranks(2, full=3)
def test_batch_norm_sees_no_row_but_those_of_the_global_batch() -> None:
    assert difference(trained(normed, strategy="ddp"), plainly(normed)) <= 1e-10


@pytest.mark.conformance
def test_dropout_of_the_examples_is_that_of_one_shard() -> None:
    def dropping() -> nn.Module:
        return Reshaping(dropout=0.3)

    one = trained(dropping, noise="example")
    for strategy in ("single:shards=3", "data_parallel:devices=cpu,cpu"):
        assert difference(trained(dropping, noise="example", strategy=strategy), one) <= 1e-10
    assert difference(one, plainly(dropping)) > 1e-4


@pytest.mark.conformance
def test_a_compiled_model_runs_uncompiled_over_no_examples() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph.forward

    for turn in (in_the_loop, in_a_closure):
        found = trained(Flattening, turn, lambda model: model.compile(backend=backend), strategy="single:shards=2")
        assert difference(found, plainly(Flattening)) <= 1e-10
    assert graphs
    assert all(tensor.numel() for inputs in graphs for tensor in inputs if isinstance(tensor, Tensor))


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(LENGTH * 4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).view(tokens.size(0), -1))


# --- evaluation, and what is not mended


@pytest.mark.ranks(2, full=3)
def test_evaluation_and_predictions() -> None:
    torch.manual_seed(0)
    plain = Reshaping(norm=True).double().eval()
    with started(progress="off") as run, torch.no_grad():
        expected = plain(TOKENS)
        model = run.prepare(Reshaping(norm=True).double()).eval()
        model.load_state_dict(plain.state_dict())
        right = seen = 0
        for tokens, labels in run.loader(TensorDataset(TOKENS, LABELS), global_batch=BATCH, train=False):
            made = model(tokens)
            assert len(made) == len(labels)
            right, seen = right + int((made.argmax(1) == labels).sum()), seen + len(labels)
        assert run.ratio(right, seen) == float((expected.argmax(1) == LABELS).double().mean())
        assert torch.backends.mha.get_fastpath_enabled()
        assert torch.allclose(run.predict(model, TensorDataset(TOKENS), global_batch=BATCH), expected, atol=1e-12)
    assert not ZERO_ROWS.left


def test_a_step_with_examples_finds_torch_as_it_is() -> None:
    with started(strategy="single:shards=2", progress="off") as run:
        run.prepare(*made(Flattening))
        for _ in run.loader(TensorDataset(TOKENS[:12]), global_batch=BATCH):
            assert [getattr(where, name) for where, name in PLACES] == PLAIN


def test_a_model_that_needs_a_row_for_other_reasons_is_named() -> None:
    def longest(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return loss_fn(model, [batch[0] * (batch[0].count_nonzero(1).max() > 0), batch[1]])

    with started(strategy="single:shards=2", progress="off") as run:
        model, _ = run.prepare(*made(Flattening))
        batches = iter(run.loader(TensorDataset(TOKENS[:1], LABELS[:1]), global_batch=BATCH))
        run.forward_backward(longest, model, next(batches))
        batch = next(batches)
        with pytest.raises(EmptyShardError, match=r"1 example.*max\(\).*len\(x\) == 0"):
            run.forward_backward(longest, model, batch)


def test_attention_that_returns_nothing_for_no_rows_is_a_tensor_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's kernels of 16 bits do; torch's own layer goes by the same function."""
    own = F.scaled_dot_product_attention

    def as_on_cuda(query: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        return own(query, *args, **kwargs) if query.shape[0] else None

    monkeypatch.setattr(F, "scaled_dot_product_attention", as_on_cuda)
    model, optimizer = made(Reshaping)
    with started() as run:
        run.prepare(model, optimizer)
        loader = object()
        ZERO_ROWS.begin_yield(loader, empty=True)
        with torch.autocast("cpu", torch.bfloat16):
            heads = torch.randn(0, 2, 5, 4, requires_grad=True)
            attended = F.scaled_dot_product_attention(heads, heads, heads[..., :3])
        assert (attended.shape, attended.dtype) == ((0, 2, 5, 3), torch.bfloat16)
        (model(TOKENS[:0]).sum() + attended.sum()).backward()
        ZERO_ROWS.end_yield(loader)
    assert heads.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
