"""Models and data of the tests of strategies, trained under Paceline and in plain PyTorch on the whole global batch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import paceline
from paceline.comm.mesh import world_group
from paceline.step import call_check

N, BATCH, EPOCHS = 22, 5, 3  # the last global batch has 2 examples: an empty shard on 3 processes
G = torch.Generator().manual_seed(7)
X = torch.randn(N, 6, generator=G, dtype=torch.float64)
TOKENS = torch.randint(9, (N, 4), generator=G)
Y = torch.randint(3, (N,), generator=G)
Loss = Callable[[Any, Any], Any]
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """A trunk, two heads, an embedding."""

    def __init__(self, sparse: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, sparse=sparse)
        self.trunk = nn.Sequential(
            nn.Linear(6, 8, bias=not norm), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 8)
        )
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.head(self.features(x, tokens))

    def features(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.trunk(x + self.embed(tokens).mean(1)).tanh()


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    return TensorDataset(X.to(dtype), TOKENS, Y)


def both_heads(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, tokens, y = batch
    features = model.features(x, tokens)  # another method than forward
    return F.cross_entropy(model.head(features), y) + F.cross_entropy(model.spare(features), y)


def one_head(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, tokens, y = batch
    return F.cross_entropy(model(x, tokens), y)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make(
    model: Callable[[], nn.Module], optimizer: bool | Make = sgd, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """optimizer: what makes it; True: adamw, False: sgd."""
    torch.manual_seed(0)
    built = model().to(dtype)
    if isinstance(optimizer, bool):
        optimizer = adamw if optimizer else sgd
    return built, optimizer(built.parameters())


def by_hand(result: Any) -> Tensor:
    """The loss that plain PyTorch minimises where a closure returns this."""
    if isinstance(result, tuple):
        return torch.stack([by_hand(item) for item in result]).sum()
    loss: Tensor = result.sum / result.count if isinstance(result, paceline.Total) else result
    return loss


def plainly(
    model: Callable[[], nn.Module],
    loss_fn: Loss,
    adam: bool | Make = False,
    wrong: float = 1.0,
    *,
    given: Dataset[Any] | None = None,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    clip: float | None = None,
    before: Callable[[Any, int], None] | None = None,
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """A job in plain PyTorch, every batch being the global batch. given: the data; those of this module if not given.
    before: called with the model and the number of the step."""
    built, optimizer = make(model, adam, dtype)
    rows: Any = given or data(dtype)
    for step, start in enumerate([*range(0, len(rows), batch)] * epochs):
        if before is not None:
            before(built, step)
        examples = default_collate([rows[i] for i in range(start, min(start + batch, len(rows)))])
        (by_hand(loss_fn(built, examples)) * wrong).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(built.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return built


@contextmanager
def calls_not_compared() -> Iterator[None]:
    """A run that is started within makes no comparison of the calls of its steps: as in all but the first of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_check, "COMPARED", 0)
        yield


@contextmanager
def started(**settings: Any) -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", **settings)
    try:
        yield run
    finally:
        run.close()


def under_paceline(
    model: Callable[[], nn.Module],
    loss_fn: Loss,
    *,
    adam: bool | Make = False,
    closure: bool = True,
    micro: int | None = None,
    given: Dataset[Any] | None = None,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    clip: float | None = None,
    before: Callable[[Any, int], None] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> nn.Module:
    """The same job under Paceline. Returns the whole model, on every process."""
    with started(**settings) as run:
        built, optimizer = run.prepare(*make(model, adam, dtype))
        loader = run.loader(given or data(dtype), global_batch=batch, micro_batch=micro)
        for _ in run.epochs(epochs):
            for examples in loader:
                if before is not None:
                    before(built, run.steps)
                optimizer.zero_grad()  # as scripts for one device have it
                loss = loss_fn if closure else loss_fn(built, examples)
                if closure:
                    run.forward_backward(loss, built, examples)
                elif isinstance(loss, paceline.Total):
                    run.backward(by_hand(loss), count=loss.count)
                else:
                    run.backward(loss)
                run.step(optimizer, max_grad_norm=clip)
        return whole(run, built, make(model, adam, dtype)[0])


def whole(run: paceline.Run, model: nn.Module, like: nn.Module) -> nn.Module:
    """A plain model with the weights of a prepared one, on every process, as an export holds them."""
    folder = run.broadcast(tempfile.mkdtemp() if run.main else "")
    run.export(f"{folder}/model.safetensors", model)
    world_group().barrier()
    like.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)  # tied weights are there once
    world_group().barrier()
    if run.main:
        shutil.rmtree(folder)
    return like


def difference(one: nn.Module, other: nn.Module) -> float:
    a = torch.cat([t.detach().double().flatten() for t in one.state_dict().values()])
    b = torch.cat([t.detach().double().flatten() for t in other.state_dict().values()])
    return float((a - b).norm() / b.norm())


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    assert difference(one, other) <= tolerance, difference(one, other)


def named(function: Callable[[], object], error: type[Exception], *words: str) -> None:
    """The function raises this error, with these words in its message, on every process."""
    try:
        function()
    except error as raised:
        assert all(word in str(raised) for word in words), str(raised)
    else:
        raise AssertionError(f"not noticed: {words}")


def refused(error: type[Exception], words: str, function: Callable[[], object]) -> None:
    named(function, error, words)


def compare_checkpoints(
    build: Callable[[], nn.Module],
    loss_fn: Loss,
    others: Sequence[Any],
    *,
    optimizer: bool | Make = adamw,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-8,
) -> None:
    """Each strategy goes on from a checkpoint of another, ddp among them, and ends with plain PyTorch's weights."""
    folder = world_group().broadcast(tempfile.mkdtemp() if world_group().rank == 0 else "")
    reference = plainly(build, loss_fn, optimizer, dtype=dtype)
    for number, (before, after) in enumerate(zip(["ddp", *others], [*others, "ddp"], strict=True)):
        place = Path(folder) / str(number)
        for strategy, stop in ((before, 7), (after, None)):
            with started(strategy=strategy) as run:
                model, its = run.prepare(*make(build, optimizer, dtype))
                loader = run.loader(data(dtype), global_batch=BATCH)
                assert run.restore(place, missing_ok=True) == (stop is None)
                for _ in run.epochs(EPOCHS):
                    for batch in loader:
                        run.forward_backward(loss_fn, model, batch)
                        run.step(its)
                        if run.steps == stop:
                            run.save(place)
                            break
                    if run.steps == stop:
                        break
                if stop is None:
                    same(whole(run, model, make(build, optimizer, dtype)[0]), reference, tolerance)


def by_data(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Which head a loss reaches depends on the examples: rows with y = 0 go to the spare one."""
    x, tokens, y = batch
    features = model.features(x, tokens)
    total = features.sum() * 0
    for head, chosen in ((model.head, y > 0), (model.spare, y == 0)):
        if chosen.any():
            total = total + F.cross_entropy(head(features[chosen]), y[chosen], reduction="sum")
    return total / max(len(y), 1)


# --- models and losses that a pipeline can cut


def layers(norm: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8, bias=not norm),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def sequential_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[2])


def counted_loss(model: nn.Module, batch: list[Tensor]) -> Any:
    """A sum over the rows whose label is not 0: another number in every micro-batch, sometimes none."""
    chosen = batch[2] > 0
    total = (F.cross_entropy(model(batch[0]), batch[2], reduction="none") * chosen).sum()
    return paceline.Total(total, chosen.sum())
