"""ddp, which a script gets by itself on several processes, against plain PyTorch on the whole global batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.strategies.checks import (
    BATCH,
    EPOCHS,
    TOKENS,
    N,
    Net,
    X,
    Y,
    both_heads,
    by_data,
    calls_not_compared,
    data,
    difference,
    make,
    one_head,
    plainly,
    same,
    started,
    under_paceline,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import EmptyShardError, ModelError, NonFiniteError, UnusedParameterError


@pytest.mark.ranks(2, full=3)
def test_every_option_of_ddp_trains_as_plain_pytorch() -> None:
    reference = plainly(Net, both_heads)
    for options in (
        "bucket_mb=0.0001",
        "gradient_as_bucket_view=true",
        "static_graph=true",
        "static_graph=true,gradient_as_bucket_view=true,bucket_mb=0.001",
        "find_unused=true",
    ):
        for micro in (None, 1):
            same(
                under_paceline(Net, both_heads, strategy=f"ddp:{options}", micro=micro, closure=micro is None),
                reference,
            )
    spec = paceline.strategy("ddp", bucket_mb=0.001, static_graph=True)
    same(under_paceline(Net, both_heads, strategy=spec), reference)
    assert difference(plainly(Net, both_heads, wrong=2.0), reference) > 1e-3


@pytest.mark.ranks(2, full=3)
@calls_not_compared()
def test_as_many_collectives_of_as_many_bytes_as_torchs_own_wrapper() -> None:
    """As many collectives, of as many bytes, as torch's own wrapper."""

    def counted(step: Callable[[], object]) -> list[tuple[str, int]]:
        with torch.profiler.profile(record_shapes=True) as profile:
            step()
        found = [e for e in profile.events() if e.name.startswith("gloo:")]
        return sorted((e.name, sum(torch.Size(s).numel() for s in e.input_shapes if s)) for e in found)

    batch = [X[:4], TOKENS[:4], Y[:4]]
    wrapped = nn.parallel.DistributedDataParallel(make(Net, False)[0], bucket_cap_mb=0.0005)
    module = wrapped.module

    class Forward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, b: list[Tensor]) -> Tensor:
            return both_heads(self.inner, b)

    wrapped = nn.parallel.DistributedDataParallel(Forward(), bucket_cap_mb=0.0005)
    for _ in range(3):
        wrapped(batch).backward()
        wrapped.zero_grad()
    theirs = counted(lambda: wrapped(batch).backward())
    with started(strategy="ddp:reducer=native,bucket_mb=0.0005") as run:
        model, optimizer = run.prepare(*make(Net, False))
        loader = run.loader(TensorDataset(*(t.repeat(4, *[1] * (t.dim() - 1)) for t in (X, TOKENS, Y))), global_batch=8)
        for number, given in enumerate(loader):

            def step(given: list[Tensor] = given) -> None:
                run.forward_backward(both_heads, model, given)
                run.step(optimizer)

            if number == 4:
                assert counted(step) == theirs, (counted, theirs)
                break
            step()
    assert len(theirs) > 1


@pytest.mark.ranks(2, full=3)
def test_the_first_bucket_has_1_mb_as_in_torchs_own_wrapper() -> None:
    """So that communication starts with the last layers' gradients. A smaller size that the user names holds for it."""

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))  # 256 KB each

    def buckets_of(reducer: Any) -> list[int]:
        """KB, in the order in which they are sent."""
        return [bucket.buffer().nbytes // 1024 for bucket in reducer._get_zeros_like_grad_buckets()]

    def ours(options: str) -> list[int]:
        with started(strategy=f"ddp{options}", progress="off") as run:
            model, optimizer = run.prepare(made := deep(), torch.optim.SGD(made.parameters(), lr=0.01))
            for batch in run.loader(TensorDataset(torch.ones(4, 256)), global_batch=4):
                run.backward(model(batch[0]).mean())
                run.step(optimizer)
            (reducer,) = run._strategy._reducers.values()  # type: ignore[attr-defined]
            return buckets_of(reducer._ddp.reducer)

    def torchs() -> list[int]:
        wrapped = nn.parallel.DistributedDataParallel(deep())
        for _ in range(2):
            wrapped(torch.ones(2, 256)).mean().backward()
        return buckets_of(wrapped.reducer)

    assert ours("") == torchs() == [1024, 3072]
    assert ours(":bucket_mb=2") == [1024, 2048, 1024]
    assert ours(":bucket_mb=0.5,gradient_as_bucket_view=true") == [512] * 8
    assert ours(":bucket_mb=1,static_graph=true") == [1024] * 4


@pytest.mark.ranks(2, full=3)
def test_sparse_gradients_are_those_of_plain_pytorch() -> None:
    def sparse() -> nn.Module:
        return Net(sparse=True)

    same(under_paceline(sparse, both_heads), plainly(sparse, both_heads))


@pytest.mark.ranks(2)
def test_sparse_gradients_that_nccl_would_have_to_add_are_refused_by_name() -> None:
    """The group is gloo's, and says that CPU tensors travel over NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_group(), "backends", {"cpu": "nccl", "cuda": "nccl"})
        try:
            under_paceline(lambda: Net(sparse=True), both_heads)
        except ModelError as error:
            assert all(part in str(error) for part in ("embed.weight", "NCCL", "sparse=False", "device='cpu'")), error
        else:
            raise AssertionError("not noticed")


@pytest.mark.ranks(2, full=3)
def test_unused_parameters_are_left_as_plain_pytorch_leaves_them() -> None:
    """A head that no loss reaches keeps its weights, under AdamW's weight decay too: its gradient is None, not zero."""
    for strategy in ("ddp", "ddp:find_unused=true"):
        trained = under_paceline(Net, one_head, adam=True, strategy=strategy)
        same(trained, plainly(Net, one_head, adam=True), 1e-8)
        assert torch.equal(trained.spare.weight, make(Net, False)[0].spare.weight)


@pytest.mark.ranks(2, full=3)
def test_paths_that_depend_on_the_data_train_as_in_plain_pytorch() -> None:
    same(under_paceline(Net, by_data, strategy="ddp:find_unused=true"), plainly(Net, by_data))


@pytest.mark.ranks(2, full=3)
@calls_not_compared()
def test_another_path_on_one_rank_is_named_and_does_not_hang() -> None:
    with started(strategy="ddp") as run:
        model, optimizer = run.prepare(*make(Net, False))
        caught: list[str] = []
        for batch in run.loader(data(), global_batch=6):
            lonely = run.world.rank == 1 and bool(caught == []) and run.steps == 2
            if run.steps == 2 and run.world.rank != 1:
                break  # the others would wait for rank 1, which never gets to its collective
            try:
                run.backward(one_head(model, batch) if lonely else both_heads(model, batch))
            except UnusedParameterError as error:
                caught.append(str(error))
                break
            run.step(optimizer)
        if run.world.rank == 1:
            assert "rank 1: backward call number 1 of this step" in caught[0]
            assert "no longer reached: spare.weight, spare.bias" in caught[0]
            assert "find_unused=true" in caught[0]


@pytest.mark.ranks(2, full=3)
def test_a_path_that_differs_from_the_start_keeps_replicas_alike_and_is_said() -> None:
    def by_rank(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return one_head(model, batch) if dist.get_rank() == 1 else both_heads(model, batch)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = under_paceline(Net, by_rank)
    sums = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, trained.spare.weight.detach().sum().float())
    assert len(set(map(float, sums))) == 1, "the replicas have drifted apart"
    texts = [str(w.message) for w in said if "reach different parameters" in str(w.message)]
    assert bool(texts) == (dist.get_rank() == 0)
    assert not texts or "spare.weight" in texts[0]


@pytest.mark.ranks(2, full=3)
def test_weights_may_be_loaded_before_or_after_prepare() -> None:
    saved = {name: t + 0.1 for name, t in make(Net, False)[0].state_dict().items() if name.startswith("trunk")}

    def loaded() -> nn.Module:
        model = Net().double()
        model.load_state_dict(saved, strict=False)
        return model

    reference = plainly(loaded, both_heads)
    same(under_paceline(loaded, both_heads), reference)
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        model.load_state_dict(saved, strict=False)
        loader = run.loader(data(), global_batch=BATCH)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                run.forward_backward(both_heads, model, batch)
                run.step(optimizer)
    same(model, reference)


@pytest.mark.ranks(2, full=3)
def test_weights_of_rank_0_are_taken_and_later_changes_on_one_rank_are_named() -> None:
    with started() as run:
        torch.manual_seed(run.world.rank)
        model = Net().double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(0)
        same(model, Net().double(), 0.0)
        if run.world.rank == 1:
            with torch.no_grad():
                model.head.weight.add_(1.0)
        try:
            for batch in run.loader(data(), global_batch=BATCH):
                run.forward_backward(both_heads, model, batch)
                break
        except ModelError as error:
            assert "the weights differ between ranks before the first step: head.weight" in str(error)
        else:
            raise AssertionError("not noticed")


@pytest.mark.ranks(2, full=3)
def test_batch_norm_by_shard_keeps_one_set_of_statistics() -> None:
    """Also where a shard is empty, whose batch norm torch would fill with NaN."""

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0].view(-1, 1, 2, 3)), batch[2])

    trained = under_paceline(convolution, loss, batch_norm="shard")
    for statistic in (trained[1].running_mean, trained[1].running_var):
        everyone = [torch.zeros_like(statistic) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, statistic)
        assert all(torch.equal(own, everyone[0]) for own in everyone)
        assert bool(torch.isfinite(statistic).all())
    assert difference(trained, plainly(convolution, loss)) > 1e-6, "by shard is not global"
    same(under_paceline(convolution, loss), plainly(convolution, loss))


@pytest.mark.ranks(2, full=3)
def test_fp16_overflows_are_skipped_alike() -> None:
    """One rank's loss overflows at step 2: every rank leaves that step out, halves the scale, and goes on."""
    with started(precision="fp16") as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.prepare(model, optimizer)
        scaler = run._precision.scaler
        assert scaler is not None
        loader = run.loader(TensorDataset(X.float(), TOKENS, Y), global_batch=6)
        for batch in loader:
            before = model.head.weight.detach().clone()
            factor = 1e38 if run.world.rank == 1 and loader.step == 2 else 1.0
            run.forward_backward(lambda m, b, f=factor: both_heads(m, b) * f, model, batch)
            scale = scaler.scale
            run.step(optimizer)
            assert torch.equal(before, model.head.weight) == (loader.step == 2), loader.step
            assert scaler.scale == scale
        assert (run.steps, run.skipped) == (3, 1)
        following = iter(run.loader(TensorDataset(X.float(), TOKENS, Y), global_batch=6, name="next"))
        run.forward_backward(both_heads, model, next(following))
        assert scaler.scale == 2.0**15
        weights = [torch.zeros_like(model.head.weight) for _ in range(run.world.size)]
        dist.all_gather(weights, model.head.weight.detach())
        assert all(torch.equal(w, weights[0]) for w in weights)


@pytest.mark.ranks(2, full=3)
def test_a_loss_that_is_not_finite_on_one_rank_is_told_by_all() -> None:
    with started() as run:
        model, optimizer = run.prepare(*make(Net, False))
        loader = run.loader(data(), global_batch=6)
        for batch in loader:
            loss = both_heads(model, batch)
            if run.world.rank == 1 and loader.step == 1:
                loss = loss * float("nan")
            run.backward(loss)
            if loader.step == 1:
                try:
                    run.step(optimizer)
                except NonFiniteError as error:
                    start = 6 + 6 // run.world.size
                    assert str(error).startswith("step 1: the loss is not finite:"), error
                    assert f"rank 1: loss nan on the examples [{start}, " in str(error), error
                    break
                raise AssertionError("not noticed")
            run.step(optimizer)


@pytest.mark.ranks(2, full=3)
@calls_not_compared()
def test_a_model_that_cannot_take_an_empty_shard_is_named() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x / x.max())

    with started() as run:
        model = Scales().double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.loader(TensorDataset(X[:1], Y[:1]), global_batch=4):
            empty = len(batch[0]) == 0
            try:
                # Without its backward: the other ranks would wait for this one.
                run._stepper.strategy.close()
                F.cross_entropy(model(batch[0]), batch[1])
            except RuntimeError:
                assert empty
            if empty:
                try:
                    run.forward_backward(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch)
                except EmptyShardError as error:
                    assert "shard of the global batch is empty" in str(error)
                    assert "drop_last=True" in str(error)
                else:
                    raise AssertionError("not noticed")


@pytest.mark.ranks(2, full=3)
def test_mean_sum_gather_and_ratio_are_exact_over_uneven_and_empty_shards() -> None:
    with started() as run:
        rank, size = run.world.rank, run.world.size
        values = torch.arange(N, dtype=torch.float64).square()
        loader = run.loader(TensorDataset(values, torch.arange(N)), train=False, global_batch=5)
        sums, seen, means = 0, [], []
        for batch, ids in loader:
            means.append(
                (run.mean(batch), run.mean(batch.mean()) if len(batch) else run.mean(torch.tensor(float("nan"))))
            )
            sums += run.sum(len(ids))
            joined = run.gather(ids)
            seen += joined.tolist()
            assert run.gather([f"{i}" for i in ids.tolist()]) == [f"{i}" for i in joined.tolist()]
        assert (sums, seen) == (N, list(range(N)))
        for number, pair in enumerate(means):
            exact = float(values[5 * number : 5 * number + 5].mean())
            assert abs(pair[0] - exact) < 1e-9, pair
            assert abs(pair[1] - exact) < 1e-9, pair
        assert run.ratio(rank, 2) == (size - 1) / 4
        own = torch.full((rank, 2), float(rank), requires_grad=True)
        joined = run.gather(own)
        assert joined.shape == (sum(range(size)), 2)
        (joined * torch.arange(len(joined)).unsqueeze(1)).sum().backward()
        first = sum(range(rank))
        expected = size * torch.arange(first, first + rank, dtype=torch.float32).unsqueeze(1).expand(-1, 2)
        assert torch.equal(own.grad if own.grad is not None else torch.zeros(0, 2), expected)


@pytest.mark.ranks(2, full=3)
def test_main_first_lets_rank_0_go_first_and_its_failure_frees_the_others() -> None:
    import time

    with started() as run:
        with run.main_first():
            if run.main:
                time.sleep(0.2)
            left = time.time()
        times = run.gather([left])
        assert times[0] == min(times)
        try:
            with run.main_first():
                if run.main:
                    raise KeyError("a failure of rank 0 does not leave the others waiting")
        except KeyError:
            assert run.main


@pytest.mark.ranks(2, full=3)
def test_dropout_differs_over_shards_and_steps_and_repeats() -> None:
    def masks() -> list[list[int]]:
        with started(seed=4) as run:
            model, optimizer = run.prepare(*make(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), False))
            drawn = []
            for batch in run.loader(
                TensorDataset(torch.ones(N, 6, dtype=torch.float64), Y), global_batch=6, micro_batch=1
            ):
                kept: list[Tensor] = []
                hook = model[0].register_forward_hook(lambda m, i, o, kept=kept: kept.append(o))
                run.forward_backward(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch)
                hook.remove()
                run.step(optimizer)
                own = [int("".join("1" if v else "0" for v in row), 2) for row in kept[0].tolist()]
                drawn.append(run.gather(own))
            return drawn

    first, second = masks(), masks()
    assert first == second
    flat = [m for step in first for m in step]
    assert len(flat) == N
    # 22 draws of 64 equally likely masks: all alike, or each step as the one before it, has no chance.
    assert len(set(flat)) > 8
    assert len({tuple(step) for step in first}) > len(first) / 2
