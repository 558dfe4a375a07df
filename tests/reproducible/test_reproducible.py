"""reproducible=V: one sha256 on any number of processes, across restarts; and another where it must be another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.reproducible import checks
from tests.reproducible.checks import (
    BATCH,
    KINDS,
    LINEAR,
    STEPS,
    Images,
    Net,
    Normed,
    Norms,
    Texts,
    Words,
    image_loss,
    text_loss,
    train,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import paceline
from paceline.comm.tree_sums import MISSING, Tree, complete, ranges, subtrees
from paceline.errors import CheckpointError, ModelError, SettingError, UsageError


@cache
def alone() -> list[str]:
    return checks.few()


@pytest.fixture(scope="module")
def three() -> list[list[Any]]:
    """Of each of three processes."""
    return run_ranks(3, "tests.reproducible.checks:together", deadline=100)


@pytest.mark.conformance
def test_one_hash_on_three_processes(three: list[list[Any]]) -> None:
    assert [found[0] for found in three] == [alone()] * 3


@pytest.mark.parametrize("strategy", ["data_parallel:devices=cpu,cpu,cpu", "mirrored:devices=cpu,cpu"])
def test_one_hash_on_devices_of_one_process(strategy: str) -> None:
    assert checks.hashes(KINDS[: checks.FEW], strategy) == alone()


@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize("strategy", ["data_parallel:devices=cpu,cpu", "mirrored:devices=cpu,cpu,cpu,cpu"])
def test_the_fuller_matrix_on_devices_of_one_process(strategy: str) -> None:
    assert checks.hashes(KINDS[checks.FEW :], strategy) == checks.more()


@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
def test_one_hash_on_a_power_of_two(n: int) -> None:
    size = 4 * (LINEAR[0] + 1) * LINEAR[1]
    for hashes, sent, changing, *_ in run_ranks(n, "tests.reproducible.checks:together", deadline=200):
        assert hashes == alone()
        assert changing == checks.changing()
        for gradient, _ in sent:
            assert gradient == pytest.approx(2 * (n - 1) / n * size + (n - 1) * 2 * 4, abs=4 * 2 * n)


@pytest.mark.full
@pytest.mark.timeout(500)
def test_the_fuller_matrix() -> None:
    expected = checks.more()
    for n in (2, 3, 4):
        assert run_ranks(n, "tests.reproducible.checks:more", deadline=150) == [expected] * n


@pytest.mark.conformance
@pytest.mark.timeout(300)
def test_four_then_one_then_three_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRODUCIBLE_FOLDER", str(tmp_path))
    for n, until in ((4, 2), (1, 5), (3, STEPS)):  # an epoch has 4 steps
        monkeypatch.setenv("REPRODUCIBLE_UNTIL", str(until))
        last = [checks.leg()] if n == 1 else run_ranks(n, "tests.reproducible.checks:leg", deadline=120)
    assert last == [alone()[::2]] * 3


def test_bytes_sent_are_the_formulas(three: list[list[Any]]) -> None:
    """comm/tree_sums.py: s (n - 1) / n of the gradient's bytes, and as much once more with s = 1."""
    size = 4 * (LINEAR[0] + 1) * LINEAR[1]
    for place, (shards, subtrees_of_each) in enumerate(((4, [1, 1, 1]), (6, [2, 2, 1]))):
        assert [len(subtrees(own, (0, shards))) for own in ranges(shards, 3)] == subtrees_of_each
        for rank, s in enumerate(subtrees_of_each):
            sent, reduced = three[rank][1][place]
            said = 2 * 2 * 4  # to two others, for two parameters, whether they have a gradient
            assert sent == pytest.approx((s + 1) * size * 2 / 3 + said, abs=32)  # pieces are of whole elements
            assert reduced <= 8  # whether something is not finite


def test_parameters_that_are_reached_now_and_then(three: list[list[Any]]) -> None:
    assert [found[2] for found in three] == [checks.changing()] * 3


def test_processes_that_differ_are_told(three: list[list[Any]]) -> None:
    for *_, weights, threads in three:
        assert "the weights differ between ranks before the first step: weight" in weights
        assert "1 on rank 0, 2 on rank 1, 1 on rank 2" in threads


def test_a_restart_in_mid_epoch(tmp_path: Path) -> None:
    train(KINDS[0], 2, tmp_path, save=True)
    assert train(KINDS[0], STEPS, tmp_path) == alone()[0]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_from_one_device_to_three_to_two(tmp_path: Path, number: int) -> None:
    kind = KINDS[number]
    train(kind, 2, tmp_path, save=True)
    train(kind, 5, tmp_path, save=True, strategy="data_parallel:devices=cpu,cpu,cpu")
    assert train(kind, STEPS, tmp_path, strategy="mirrored:devices=cpu,cpu") == alone()[2 * number]


def test_another_number_of_shards_or_threads_is_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(("images", 3, "fp32", None), STEPS) != alone()[0]
    found = []
    for threads in ("1", "2", "1"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found.append(checks.wide())
    assert found[0] == found[2] != found[1]


def test_a_checkpoint_of_other_shards_or_threads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(KINDS[0], 2, tmp_path, save=True)
    with pytest.raises(CheckpointError, match="reproducible: 4, but this run has 5"):
        train(("images", 5, "fp32", None), STEPS, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(CheckpointError, match="Start with OMP_NUM_THREADS=1"):
        train(KINDS[0], STEPS, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    with pytest.warns(UserWarning, match="instructions: .*'ANOTHER'"):
        train(KINDS[0], STEPS, tmp_path)


@pytest.mark.parametrize("net", [Net, Words])
def test_it_is_what_plain_pytorch_computes(net: type[Net] | type[Words]) -> None:
    """One step of the whole global batch, without dropout, to rounding: means over examples, and over tokens."""
    run = paceline.start(reproducible=6, device="cpu", seed=3, progress="off")
    model, plain = net(dropout=0.0), net(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    data = [(Images() if net is Net else Texts())[i] for i in range(BATCH)]
    loss_fn = image_loss if net is Net else text_loss
    for batch in run.loader(data, global_batch=BATCH, micro_batch=1):
        run.forward_backward(loss_fn, model, batch)
        run.step(max_grad_norm=0.2)
    run.close()
    loss = loss_fn(plain, default_collate(data))
    if net is Words:
        total, mean = loss
        loss = total.sum / total.count + mean
    loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
    theirs.step()
    for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_batch_norm_over_the_global_batch_is_what_plain_pytorch_computes() -> None:
    """Weights and running statistics of several steps, to rounding. The last global batch has three examples, and so
    an empty shard."""
    run = paceline.start(reproducible=4, device="cpu", seed=3, progress="off")
    model, plain = Normed(dropout=0.0).double(), Normed(dropout=0.0).double()
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = [(images.double(), label) for images, label in map(Images().__getitem__, range(2 * BATCH + 3))]
    for batch in run.loader(data, global_batch=BATCH):
        for optimizers in (None, optimizer):  # two calls a batch
            run.forward_backward(image_loss, model, batch, optimizer=optimizers)
        run.step(max_grad_norm=0.5)
        model.head.weight.data = model.head.weight.data.clone()  # elsewhere: the shards' copies follow
    run.close()
    for start in range(0, len(data), BATCH):
        batch = default_collate(data[start : start + BATCH])
        for _ in range(2):
            image_loss(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    for name, mine in model.state_dict().items():
        torch.testing.assert_close(
            mine, plain.state_dict()[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_gradient_penalty_through_batch_norm_of_all_shards() -> None:
    """autograd.grad with create_graph=True within the closure."""

    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum(1).mean() if len(x) else grad.sum()

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()

    model, plain = net(), net()
    data = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).double()
    run = paceline.start(reproducible=3, device="cpu", progress="off")
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.loader(list(data), global_batch=7):
        run.forward_backward(penalty, model, batch)
        run.step()
    run.close()
    penalty(plain, data).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its - 0.1 * (0 if its.grad is None else its.grad), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{"reproducible": 4}, {"strategy": "single:shards=4"}], ids=str)
def test_batch_norm_of_each_shard_is_what_processes_of_their_own_compute(settings: dict[str, Any]) -> None:
    """Each shard goes on from the running statistics before the step; what remains is their mean. The fourth step has
    three examples, and so an empty shard."""
    run = paceline.start(device="cpu", seed=3, progress="off", batch_norm="shard", **settings)
    model, plain = Norms(), Norms()
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [Images()[i] for i in range(3 * BATCH + 3)]
    for batch in run.loader(data, global_batch=BATCH, micro_batch=None):
        run.forward_backward(image_loss, model, batch)
        run.step()
    run.close()
    for start in range(0, len(data), BATCH):
        whole = data[start : start + BATCH]
        before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        after = []
        for i in range(4):
            part = [whole[place] for place in torch.arange(len(whole)).tensor_split(4)[i]]
            plain.load_state_dict(before, strict=False)
            if part:
                images, labels = torch.stack([x for x, _ in part]), torch.tensor([y for _, y in part])
                (F.cross_entropy(plain(images), labels) * len(part) / len(whole)).backward()
            after.append({name: buffer.clone() for name, buffer in plain.named_buffers()})
        theirs.step()
        theirs.zero_grad()
        for name, buffer in plain.named_buffers():
            every = torch.stack([own[name] for own in after])
            buffer.copy_(every.mean(0) if buffer.is_floating_point() else every.amax(0))
    for name, mine in model.state_dict().items():
        torch.testing.assert_close(
            mine, plain.state_dict()[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def loop(model: nn.Module, step: Any) -> None:
    run = paceline.start(reproducible=2, device="cpu", progress="off")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for batch in run.loader([torch.ones(2)] * 4, global_batch=4):
            step(run, model, optimizer, batch)
    finally:
        run.close()


def usual(run: Any, model: nn.Module, optimizer: Any, batch: Tensor) -> None:
    run.backward(model(batch).mean())
    run.step()


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


def test_what_cannot_be_made_reproducible_is_refused() -> None:
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UsageError, match=r"run.forward_backward\(loss_fn, model, batch\)"):
        loop(normed, usual)

    def from_outside(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
        run.forward_backward(lambda own, x: own(x).mean() + normed[0].weight.square().sum(), model, batch)

    with pytest.raises(UsageError, match="Use the `model` of loss_fn"):
        loop(normed, from_outside)

    def late(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
        run.prepare(normed)

    with pytest.raises(ModelError, match="before the loop"):
        loop(nn.Linear(2, 2), late)

    def small(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
        for _ in run.loader([torch.ones(2)] * 8, global_batch=8, micro_batch=2, name="small"):
            pass

    with pytest.raises(ModelError, match="micro_batch=2 splits a global batch of 8"):
        loop(normed, small)
    with pytest.raises(ModelError, match=r"Counting.*changes a buffer"):
        loop(Counting(), usual)
    loop(Counting().eval(), usual)

    def twice(run: Any, model: nn.Module, optimizer: Any, batch: Tensor) -> None:
        usual(run, model, optimizer, batch)
        usual(run, model, optimizer, batch)

    with pytest.raises(UsageError, match="backward call"):
        loop(nn.Linear(2, 2), twice)

    too_many, with_option = "data_parallel:devices=cpu,cpu,cpu", "mirrored:devices=cpu,cpu,reduction=ring"
    names = ("fsdp", "central_storage:devices=cpu,cpu", too_many, with_option, "ddp:bucket_mb=2", "single:shards=2")
    for settings in (*({"strategy": name} for name in names), {"cudnn_benchmark": True}, {"compile": True}):
        with pytest.raises(SettingError, match="reproducible=2"):
            paceline.start(device="cpu", reproducible=2, **settings)
    with pytest.raises(SettingError, match="reproducible=0"):
        paceline.start(device="cpu", reproducible=0)


def test_threads_are_one_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for variables, threads in (({"OMP_NUM_THREADS": "2"}, 2), ({"PACELINE_THREAD_BUDGET": "2"}, 1)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        run = paceline.start(device="cpu", reproducible=2, progress="off")
        assert torch.get_num_threads() == threads
        assert torch.are_deterministic_algorithms_enabled()
        run.close()
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 6, 7, 11, 16])
def test_the_tree_is_the_same_wherever_its_leaves_are(shards: int) -> None:
    root = (0, shards)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(50, generator=generator) * 10.0**i for i in range(shards)]
    expected = complete(root, {(i, i + 1): leaf for i, leaf in enumerate(leaves)}, torch.add)
    for n in range(1, shards + 1):
        owned = ranges(shards, n)
        assert [i for lo, hi in owned for i in range(lo, hi)] == list(range(shards))
        assert max(hi - lo for lo, hi in owned) - min(hi - lo for lo, hi in owned) <= 1
        assert min(hi - lo for lo, hi in owned) >= 1
        held = {}
        for mine in owned:
            tree = Tree(shards)
            for i in range(*mine):
                tree.put(i, [leaves[i].clone()])
            assert [node for node, _ in tree.partial] == subtrees(mine, root)
            assert len(tree.partial) == 1 or n & (n - 1)  # a power of two: what a ring sends, and no more
            held.update({node: tensors[0] for node, tensors in tree.partial})
        assert torch.equal(complete(root, held, torch.add), expected)


def test_what_is_missing_changes_no_bit() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, float("inf")])
    assert (values + MISSING).numpy().tobytes() == values.numpy().tobytes()


def test_the_summary_says_the_name_that_a_script_may_give(capsys: pytest.CaptureFixture[str]) -> None:
    run = paceline.start(reproducible=2)
    try:
        model = nn.Linear(1, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(torch.utils.data.TensorDataset(torch.ones(4, 1)), global_batch=4):
            run.backward(model(x).mean())
            run.step(optimizer)
    finally:
        run.close()
    told = capsys.readouterr()
    assert "strategy single," in told.out + told.err
