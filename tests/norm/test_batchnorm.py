"""Batch norm over replicas: the cases on threads, with torch's operations and with CUDA's kernels, and what `convert`
changes and refuses. On processes: test_batchnorm_on_ranks.py."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.norm import batchnorm_cases as cases
from tests.norm.batchnorm_stand_ins import in_place_of_the_kernels
from torch import Tensor, nn

from paceline.comm.mesh import Replicas, current
from paceline.comm.threads import ThreadTeam
from paceline.errors import ModelError
from paceline.norm import batchnorm
from paceline.norm.batchnorm import GlobalBatchNorm1d, GlobalBatchNorm2d, GlobalBatchNorm3d, convert

# ---- on threads ----


@pytest.fixture(scope="module", params=["free", "turns", "kernels"])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    kernels = in_place_of_the_kernels() if request.param == "kernels" else contextlib.nullcontext()
    with kernels, contextlib.closing(ThreadTeam(3, take_turns=request.param == "turns")) as team:
        yield team


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case_on_threads(case: cases.Case, team: ThreadTeam) -> None:
    team.run([lambda: cases.run_case(case)] * 3)


@pytest.mark.parametrize(
    "function",
    [cases.same_examples_case, cases.float32_case, cases.pure_half_case, cases.refusals_case, cases.synced_case],
    ids=lambda function: function.__name__,
)
def test_on_threads(function: Callable[[], None], team: ThreadTeam) -> None:
    team.run([function] * 3)


# ---- alone ----


@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_torchs_own_bit_for_bit(training: bool) -> None:
    plain = nn.BatchNorm2d(4).train(training)
    layer = copy.deepcopy(plain)
    convert(layer)
    for _ in range(2):
        x = torch.randn(3, 4, 5, 5)
        assert torch.equal(layer(x), plain(x))
        for a, b in zip(layer.buffers(), plain.buffers()):
            assert torch.equal(a, b)
    if training:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            layer(torch.zeros(1, 4, 1, 1))


class Untouched(Replicas):
    """Two replicas that must not communicate."""

    size, rank = 2, 0

    def sum(self, tensor: Tensor) -> Tensor:
        raise AssertionError("no communication here")


def test_eval_does_not_communicate() -> None:
    layer = nn.BatchNorm1d(4)
    convert(layer)
    layer.eval()
    with current().computing(Untouched()):
        layer(torch.randn(3, 4, requires_grad=True)).sum().backward()
        layer.train()
        with pytest.raises(AssertionError, match="no communication"):
            layer(torch.randn(3, 4))


class Counting(Replicas):
    """Two replicas, of which the other's shards are all empty."""

    size, rank, sums = 2, 0, 0

    def sum(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        return tensor.clone()


def test_the_backward_is_of_the_forwards_replicas() -> None:
    """On CUDA it runs in a thread of autograd's, which knows of no replicas. It communicates once, if at all."""
    layer, x = nn.BatchNorm1d(4), torch.randn(3, 4, requires_grad=True)
    convert(layer)
    replicas = Counting()
    with current().computing(replicas):
        outputs = [layer(x), layer(x), layer(x.detach())]
    assert replicas.sums == 3
    with current().computing(Untouched()):
        outputs[0].sum().backward()
        assert replicas.sums == 4
        torch.autograd.grad(outputs[1].sum(), x, create_graph=True)[0].sum().backward()
        assert replicas.sums == 7
        outputs[2].sum().backward()
        assert replicas.sums == 7, "without a gradient for x there is nothing to add"


# ---- convert ----


class Momentum(nn.BatchNorm2d):
    """A subclass such as scripts have: no forward."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.01)

    def extra(self) -> int:
        return self.num_features


class Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def model() -> nn.Sequential:
    shared = nn.BatchNorm1d(6)
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.BatchNorm2d(4), nn.BatchNorm3d(5), nn.Sequential(shared, shared), nn.InstanceNorm2d(3)
    )


def test_convert_keeps_every_object() -> None:
    net = model()
    modules, tensors = list(net.modules()), [*net.parameters(), *net.buffers()]
    keys = list(net.state_dict())
    assert convert(net) == 4
    assert all(a is b for a, b in zip(net.modules(), modules))
    assert all(a is b for a, b in zip([*net.parameters(), *net.buffers()], tensors))
    assert list(net.state_dict()) == keys
    kinds = [type(net[0]), type(net[1]), type(net[2]), type(net[3][0]), type(net[4])]
    assert kinds == [GlobalBatchNorm1d, GlobalBatchNorm2d, GlobalBatchNorm3d, GlobalBatchNorm1d, nn.InstanceNorm2d]
    assert isinstance(net[1], nn.BatchNorm2d)
    assert convert(net) == 0, "a second call finds nothing"
    assert convert(nn.Linear(2, 2)) == 0


def test_a_scripts_own_subclass_keeps_its_methods() -> None:
    layer = Momentum(4)
    assert convert(layer) == 1
    assert isinstance(layer, Momentum)
    assert layer.extra() == 4
    assert type(layer).forward is GlobalBatchNorm2d.forward
    other = Momentum(4)
    convert(other)
    assert type(other) is type(layer)


@pytest.mark.parametrize("kind", [lambda: nn.BatchNorm2d(4), lambda: Momentum(4)], ids=["torch's", "own"])
def test_pickle_deepcopy_and_save(kind: Callable[[], nn.Module]) -> None:
    net = nn.Sequential(kind())
    convert(net)
    net(torch.randn(2, 4, 3, 3))
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)):
        assert type(copied[0]) is type(net[0])
        assert copied[0].running_mean is not net[0].running_mean
        for key, value in net.state_dict().items():
            assert torch.equal(copied.state_dict()[key], value)
        assert convert(copied) == 0


def test_what_cannot_be_converted_is_named_and_nothing_is_changed() -> None:
    patched = nn.BatchNorm2d(4)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    refused = [
        (Own(4), r"Batch norm 1\.bn \(Own\) has a custom forward.*batch_norm='shard'"),
        (patched, r"Batch norm 1\.bn \(BatchNorm2d\) has a custom forward"),
        (nn.LazyBatchNorm2d(), r"Batch norm 1\.bn \(LazyBatchNorm2d\) has no channels yet.*Run the model once"),
        (torch.jit.script(nn.BatchNorm2d(4)), r"Batch norm 1\.bn \(BatchNorm2d\) is a compiled TorchScript module"),
    ]
    for layer, message in refused:
        net = nn.Sequential(nn.BatchNorm2d(4), nn.ModuleDict({"bn": layer}))
        with pytest.raises(ModelError, match=message):
            convert(net)
        assert type(net[0]) is nn.BatchNorm2d
    with pytest.raises(ModelError, match=r"\(the model itself\)"):
        convert(Own(4))


def test_a_lazy_batch_norm_that_has_seen_an_example_is_converted() -> None:
    layer = nn.LazyBatchNorm2d()
    layer(torch.randn(2, 4, 3, 3))
    assert convert(layer) == 1
    assert type(layer) is batchnorm.GlobalBatchNorm2d
