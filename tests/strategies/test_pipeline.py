"""The pipeline on several processes, against plain PyTorch on the whole global batch: training, tied weights, refusals.
Schedules, cuts and state: test_pipeline_schedules.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.strategies.checks import (
    Net,
    X,
    Y,
    counted_loss,
    layers,
    one_head,
    plainly,
    same,
    sequential_loss,
    started,
    under_paceline,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import ModelError, UsageError


@pytest.mark.ranks(2, full=3)
def test_micro_batches_batch_norm_and_counts_train_as_plain_pytorch() -> None:
    for adam in (False, True):
        tolerance = 1e-8 if adam else 1e-10
        for micro in (None, 2, 1):
            trained = under_paceline(layers, sequential_loss, adam=adam, micro=micro, strategy="pipeline")
            same(trained, plainly(layers, sequential_loss, adam=adam), tolerance)
    same(
        under_paceline(lambda: layers(True), sequential_loss, strategy="pipeline"),
        plainly(lambda: layers(True), sequential_loss),
    )

    same(under_paceline(layers, counted_loss, micro=2, strategy="pipeline"), plainly(layers, counted_loss))
    same(under_paceline(layers, counted_loss, micro=2, strategy="ddp"), plainly(layers, counted_loss))


@pytest.mark.ranks(2, full=3)
def test_a_model_of_two_arguments_trains_as_plain_pytorch() -> None:
    def by_keyword(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(tokens=batch[1], x=batch[0]), batch[2])

    for loss_fn in (one_head, by_keyword):
        for micro in (None, 2):
            same(under_paceline(Net, loss_fn, micro=micro, strategy="pipeline"), plainly(Net, loss_fn))


@pytest.mark.ranks(2)
def test_a_loop_that_looks_at_its_batch_or_calls_backward_is_refused() -> None:
    with started(strategy="pipeline") as run:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.loader(TensorDataset(X, Y), global_batch=4):
            try:
                images, labels = batch
            except UsageError as error:
                assert "run.forward_backward(loss_fn, model, batch)" in str(error)
            else:
                raise AssertionError((images, labels))
            try:
                run.backward(model(X).sum())
            except UsageError as error:
                assert "forward_backward" in str(error)
            else:
                raise AssertionError
            break


@pytest.mark.ranks(2, full=3)
def test_a_layer_without_weights_that_stands_twice_is_kept_twice() -> None:
    def repeated() -> nn.Module:
        act = nn.Tanh()
        return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3), act)

    same(under_paceline(repeated, sequential_loss, strategy="pipeline"), plainly(repeated, sequential_loss))


def tied(*pairs: tuple[int, int]) -> Callable[[], nn.Module]:
    """Layers 0, 2, 4, ... are linear; the weights of each pair are one."""

    def build() -> nn.Module:
        linear = [nn.Linear(6, 6) for _ in range(4)]
        for a, b in pairs:
            linear[b].weight = linear[a].weight
        return nn.Sequential(*(layer for one in linear for layer in (one, nn.Tanh())), nn.Linear(6, 3))

    return build


@pytest.mark.ranks(2, full=3)
def test_weights_tied_across_stages_have_the_sum_of_their_gradients() -> None:
    for model in (tied((0, 1)), tied((0, 3)), tied((0, 1), (1, 2), (2, 3))):
        for loss_fn in (sequential_loss, counted_loss):
            for micro in (None, 1):
                trained = under_paceline(model, loss_fn, micro=micro, strategy="pipeline")
                same(trained, plainly(model, loss_fn))
                first = trained[0].weight.detach().clone()
                dist.broadcast(first, src=0)
                assert torch.equal(first, trained[0].weight), "the processes have drifted apart"


@pytest.mark.ranks(2, full=3)
def test_several_calls_add_to_a_tied_weight_once_each() -> None:
    """A second call of the closure in one global batch must not count the first one's gradient twice."""
    model, plain = (tied((0, 3))().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    with started(strategy="pipeline") as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        plain.load_state_dict(run._strategy.state_dict()["models"][0])  # rank 0's
        for batch in run.loader(TensorDataset(X, X, Y), global_batch=11):
            for _ in range(2):
                run.forward_backward(sequential_loss, model, batch)
            run.step(optimizer)
        run._strategy.state_dict()  # now each process has all of it
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 11):
        rows = slice(start, start + 11)
        (2 * sequential_loss(plain, [X[rows], X[rows], Y[rows]])).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(model, plain)


@pytest.mark.ranks(2, full=3)
def test_a_buffer_in_two_stages_is_refused() -> None:
    norm = nn.BatchNorm1d(6)
    with_norm = nn.Sequential(norm, *(nn.Linear(6, 6) for _ in range(4)), norm).double()
    words = ["buffer", "0.running_mean", "stages 0 and", "Use a separate layer"]
    with started(strategy="pipeline") as run:
        run.prepare(with_norm)
        for batch in run.loader(TensorDataset(X, X, Y), global_batch=11):
            try:
                run.forward_backward(sequential_loss, with_norm, batch)
            except ModelError as error:
                assert all(word in str(error) for word in words), error
            else:
                raise AssertionError(words)
            break


class Routed(nn.Module):
    """Each example goes to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = (x.sum(1) > 0).long()
        for number in range(2):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return x + out


def routed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Routed(), nn.Tanh(), Routed(), nn.Linear(8, 3))


def reading_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Asks for values of the output, and differentiates by it."""
    output = model(batch[0])
    assert 0.0 <= (output.argmax(1) == batch[2]).double().mean().item() <= 1.0
    (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
    return F.cross_entropy(output, batch[2]) + slope.square().mean()


@pytest.mark.ranks(2, full=3)
def test_a_layer_that_routes_by_values_and_a_closure_that_reads_the_output() -> None:
    for micro in (None, 3):
        trained = under_paceline(routed, reading_loss, micro=micro, strategy="pipeline")
        same(trained, plainly(routed, reading_loss))


@pytest.mark.ranks(2)
def test_a_closure_that_differentiates_by_its_input_is_refused() -> None:
    """The layers between are other processes'."""

    def penalty(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    try:
        under_paceline(layers, penalty, strategy="pipeline")
    except ModelError as error:
        assert "a gradient penalty" in str(error), error
        assert "'ddp'" in str(error), error
    else:
        raise AssertionError


@pytest.mark.ranks(2)
def test_compiled_layers_train_as_plain_pytorch() -> None:
    def compiled() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 3))
        for layer in model:
            layer.compile(backend="eager")
        return model

    same(under_paceline(compiled, sequential_loss, strategy="pipeline"), plainly(compiled, sequential_loss))
