"""Codecs between replicas in threads: their books balance, and what is sent is what the papers say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.comm.test_reducers import in_threads
from torch import Tensor

from paceline.comm.codec_sums import ReducerSums
from paceline.comm.codecs import PowerSGD, Rounding, State, TopK, orthonormal, parse
from paceline.comm.endpoints import thread_endpoints
from paceline.comm.reducers import REDUCERS
from paceline.errors import SettingError

SHAPES = [(12, 10), (7,), (4, 3, 2, 2), (1, 5), ()]
NUMEL = 12 * 10 + 7 + 48 + 5 + 1
LOSSY = ["bf16", "fp16", "powersgd:rank=2", "topk:ratio=0.05"]
CASES = [
    pytest.param(codec, reducer, id=f"{codec}-{reducer}")
    for codec in LOSSY
    for reducer in REDUCERS
    if reducer == "ring" or not codec.startswith("topk")
]


class Replicas:
    """Several, on threads, each with its states."""

    def __init__(self, codec: str, reducer: str = "ring", size: int = 3, dtype: torch.dtype = torch.float64) -> None:
        parsed = parse(codec)
        assert parsed is not None
        self.codec = parsed
        machines = [[0], [1, 2]] if size == 3 else None
        self.sums = [ReducerSums(REDUCERS[reducer], one) for one in thread_endpoints(size, machines)]
        like = torch.zeros(1, dtype=dtype)
        self.states = [[self.codec.init(shape, like, seed=5) for shape in SHAPES] for _ in range(size)]

    def step(self, gradients: Sequence[Tensor], feedback: bool = True) -> Tensor:
        """One step: the decoded sum, which is the same bits on all."""
        flats = [gradient.clone() for gradient in gradients]
        for flat, states in zip(flats, self.states, strict=True) if feedback else ():
            flat += residual(states)
        work = zip(flats, self.states, self.sums, strict=True)
        self.states = in_threads([partial(self.codec.total, flat, SHAPES, *rest) for flat, *rest in work])
        for states in self.states:
            if isinstance(states, BaseException):
                raise states
        assert all(torch.equal(flat.isfinite(), flats[0].isfinite()) for flat in flats)
        assert all(torch.equal(flat[flat.isfinite()], flats[0][flats[0].isfinite()]) for flat in flats)
        return flats[0]


def residual(states: Sequence[State]) -> Tensor:
    return torch.cat([state["residual"] for state in states])


def gradients(step: int, size: int = 3) -> list[Tensor]:
    """Of unlike magnitudes, with a part that is the same in all steps."""
    generator = torch.Generator().manual_seed(step)
    scale = torch.logspace(-6, 2, NUMEL, dtype=torch.float64)
    constant = torch.randn(NUMEL, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return [scale * (constant + torch.randn(NUMEL, generator=generator, dtype=torch.float64)) for _ in range(size)]


@pytest.mark.parametrize(("codec", "reducer"), CASES)
def test_the_books_balance(codec: str, reducer: str) -> None:
    """After any number of steps: all gradients = all that was decoded + the residuals. Not so without feedback."""
    errors = {}
    for feedback in (True, False):
        replicas = Replicas(codec, reducer)
        given = decoded = torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(12):
            own = gradients(step)
            given = given + torch.stack(own).sum(0)
            decoded = decoded + replicas.step(own, feedback)
        left = torch.stack([residual(states) for states in replicas.states]).sum(0)
        errors[feedback] = float((given - decoded - left).norm() / given.norm())
    assert errors[True] < 1e-13
    assert errors[False] > 1e-6, "a test that cannot fail"


@pytest.mark.parametrize("codec", LOSSY)
def test_the_mean_of_what_is_decoded_converges_to_the_mean_of_the_gradients(codec: str) -> None:
    """At the rate 1/T, since the residual stays bounded: of constant gradients, after T and 4 T steps."""
    far = []
    own = gradients(0)
    exact = torch.stack(own).sum(0)
    for steps in (50, 200):
        replicas = Replicas(codec)
        decoded = sum(replicas.step(own) for _ in range(steps))
        far.append(float((decoded / steps - exact).norm() / exact.norm()))
    assert far[1] < 0.02
    assert far[1] < 0.5 * far[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-35, 1e-8, 1.0, 6e4, 1e36])
def test_fp16_neither_overflows_nor_underflows(magnitude: float, dtype: torch.dtype) -> None:
    """6e4 fits into fp16 on each of three replicas, their sum does not; 1e-8 is below all that fp16 has."""
    replicas = Replicas("fp16", dtype=dtype)
    own = [torch.linspace(0.5, 1, NUMEL, dtype=torch.float64).mul(magnitude).to(dtype) for _ in range(3)]
    if magnitude not in (1.0,):
        naive = torch.stack([one.half() for one in own]).sum(0).to(dtype)
        assert not torch.allclose(naive, sum(own), rtol=1e-2, atol=0)  # type: ignore[arg-type]
    torch.testing.assert_close(replicas.step(own), sum(own), rtol=2e-3, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(("codec", "reducer"), CASES)
def test_what_is_not_finite_on_one_replica_is_so_on_all(codec: str, reducer: str, bad: float) -> None:
    for place in (0, 60, 125, NUMEL - 1):
        own = gradients(0)
        own[1][place] = bad
        assert not Replicas(codec, reducer).step(own).isfinite().all()


def test_top_k_sends_the_largest_of_each_tensor() -> None:
    codec = TopK(0.25)
    flat = torch.tensor([1.0, -5, 2, 3, 0.1, 0.2, -0.3, 0.0, 7])
    indices, values = codec.encode(flat, [(2, 2), (4,), ()])
    assert sorted(zip(indices.tolist(), values.tolist(), strict=True)) == [
        (1, -5.0),
        (6, pytest.approx(-0.3)),
        (8, 7.0),
    ]
    assert [codec.count(n) for n in (0, 1, 4, 5, 100)] == [0, 1, 1, 2, 25]
    assert TopK(0.01).count(300) == 3
    assert TopK(1.0).count(300) == 300


def test_power_sgd_leaves_a_matrix_of_its_rank_as_it_is() -> None:
    """And vectors, and matrices that two thin ones would not shrink."""
    replicas = Replicas("powersgd:rank=2")
    assert ["q" in state for state in replicas.states[0]] == [True, False, True, False, False]
    own = gradients(1)
    for number, gradient in enumerate(own):
        generator = torch.Generator().manual_seed(number)
        left = torch.randn(12, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        gradient[:120] = (left @ torch.randn(2, 10, generator=generator, dtype=torch.float64)).flatten()
        left = torch.randn(4, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        gradient[127:175] = (left @ torch.randn(2, 12, generator=generator, dtype=torch.float64)).flatten()
    torch.testing.assert_close(replicas.step(own), torch.stack(own).sum(0), rtol=1e-10, atol=1e-10)


def test_power_sgd_does_not_depend_on_the_number_of_replicas() -> None:
    """It is linear: three replicas decode what one decodes that has the sum of their gradients. Top-k does not."""
    for codec, alike in (("powersgd:rank=1", True), ("topk:ratio=0.05", False)):
        three, one = Replicas(codec), Replicas(codec, size=1)
        for step in range(5):
            own = gradients(step)
            pair = three.step(own), one.step([torch.stack(own).sum(0)])
        assert torch.allclose(*pair, rtol=1e-9, atol=1e-9) == alike


def test_power_sgd_comes_to_the_best_matrix_of_its_rank() -> None:
    """Power iteration on one matrix without feedback: the singular vectors of largest value (Eckart and Young)."""
    left, right = (torch.linalg.qr(torch.randn(n, 10, dtype=torch.float64)).Q for n in (12, 10))
    matrix = left @ torch.diag(torch.logspace(2, -2, 10, dtype=torch.float64)) @ right.mT
    best = left[:, :2] @ torch.diag(torch.logspace(2, -2, 10, dtype=torch.float64)[:2]) @ right[:, :2].mT
    replicas = Replicas("powersgd:rank=2", size=1)
    own = torch.zeros(NUMEL, dtype=torch.float64)
    own[:120] = matrix.flatten()
    for _ in range(30):
        decoded = replicas.step([own], feedback=False)
    torch.testing.assert_close(decoded[:120].view(12, 10), best, rtol=0, atol=1e-6)


def test_orthonormal_bases_of_unlike_and_dependent_columns() -> None:
    matrices = [torch.randn(6, 2), torch.zeros(6, 2), torch.randn(4, 3), torch.ones(6, 2)]
    for basis in orthonormal(matrices):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1]))


def test_names() -> None:
    assert parse("none") is None
    assert isinstance(parse("bf16"), Rounding)
    assert isinstance(parse("powersgd"), PowerSGD)
    for text in ("powersgd:rank=4", "topk:ratio=0.01"):
        codec = parse(text)
        assert codec is not None
        assert codec.name == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powrsgd", "Did you mean 'powersgd'"),
        ("bf-16", "Did you mean 'bf16'"),
        ("powersgd:rnk=4", "has no option 'rnk'. Did you mean 'rank'"),
        ("powersgd:rank=0", "at least 1"),
        ("powersgd:rank=-1", "at least 1"),
        ("powersgd:rank=2.5", "whole number"),
        ("powersgd:4", "no option '4'"),
        ("topk:ratio=0", "above 0 and up to 1"),
        ("topk:ratio=1.1", "above 0 and up to 1"),
        ("topk:ratio=nan", "above 0 and up to 1"),
        ("topk:ratio=much", "above 0 and up to 1"),
        ("bf16:rank=1", "takes no options"),
        ("none:x", "takes no options"),
    ],
)
def test_what_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        parse(text)
    with pytest.raises(SettingError, match="use a name such as"):
        parse(None)  # type: ignore[arg-type]
