"""Models as people bring them, under `tensor` and `pipeline`: what is found in them, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import run_ranks
from tests.strategies.brought import (
    Conv1D,
    Decoder,
    Doubled,
    Output,
    Repeated,
    Sentences,
    by_logits,
    halves,
    make,
)
from tests.strategies.checks import started
from torch import Tensor, nn

from paceline.errors import ModelError, SettingError
from paceline.strategies.base import Term
from paceline.strategies.kit.outputs import holds, mapped
from paceline.strategies.pipeline.pipeline_calls import Calls, check_names, form_of, places_of
from paceline.strategies.pipeline.placeholders import Placeholder, form, placeholder
from paceline.strategies.tensor import tensor_plan
from paceline.strategies.tensor.tensor_layers import Thirds, is_transposed_linear


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["tensor", "pipeline:cut=h.1"])
def test_one_process_goes_on_from_their_checkpoint(strategy: str, tmp_path: Path) -> None:
    run_ranks(2, "tests.strategies.brought:saved", str(tmp_path), strategy)
    plain, optimizer = make(Decoder, True)
    data = Sentences()
    for start in range(0, len(data), 4):
        batch = torch.utils.data.default_collate([data[i] for i in range(start, min(start + 4, len(data)))])
        loss = by_logits(plain, batch)
        (loss.sum / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    with started(strategy="single") as run:
        model, own = run.prepare(*make(Decoder, True))
        assert run.restore(tmp_path)
        expected = plain.state_dict()
        for name, tensor in model.state_dict().items():
            assert tensor.shape == expected[name].shape
            assert float((tensor - expected[name]).norm()) <= 1e-8 * float(expected[name].norm() + 1), name
        assert model.lm_head.weight is model.wte.weight
        moments = [own.state[p]["exp_avg"] for p in model.parameters()]
        theirs = [optimizer.state[p]["exp_avg"] for p in plain.parameters()]
        assert all(float((a - b).norm()) <= 1e-8 for a, b in zip(moments, theirs, strict=True))


# --- tensor: what is found


def kinds(model: nn.Module, size: int = 2) -> dict[str, str]:
    return {name: kind for name, (_, kind) in tensor_plan.found(model, size)[0].items()}


def test_blocks_are_found_by_what_their_layers_compute() -> None:
    assert kinds(Repeated()) == {
        "layer.attn.c_attn": "qkv",
        "layer.attn.c_proj": "row",
        "layer.inner.enter": "column",
        "layer.inner.leave": "row",
    }
    assert len(kinds(Decoder())) == 12

    class Beside(nn.Module):
        """As BERT: what joins the heads is beside the attention, in another module."""

        def __init__(self) -> None:
            super().__init__()
            self.self = nn.Module()
            for name in ("query", "key", "value"):
                self.self.add_module(name, nn.Linear(8, 8))
            self.self.num_attention_heads = 4
            self.output = nn.Sequential(nn.Identity())
            self.output.add_module("dense", nn.Linear(8, 8))

    found = kinds(nn.ModuleDict({"a": Beside()}))
    assert found == {
        **{f"a.self.{name}": "column" for name in ("query", "key", "value")},
        "a.output.dense": "row",
    }

    class Normed(nn.Module):
        """Widens and comes back, with a layer that has parameters between."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    assert kinds(Normed()) == {}


def test_grouped_convolutions_stay_cut_up_to_the_next_one() -> None:
    assert kinds(halves()) == {"3": "gather", "6": "column", "8": "gather", "10": "column", "12": "row"}
    plan, passed = tensor_plan.found(halves(), 4)
    assert "3" not in plan
    assert any("has groups=2, which 4 devices cannot share evenly" in line for line in passed)
    assert kinds(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU())) == {}, "one channel a group"


def test_a_layer_that_computes_something_else_is_no_transposed_linear() -> None:
    class Scaled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    assert is_transposed_linear(Conv1D(6, 4))
    assert not any(map(is_transposed_linear, (Scaled(6, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Bilinear(2, 2, 2))))


def test_thirds_are_taken_apart_without_joining_them() -> None:
    parts = [torch.randn(2, 5, 4, requires_grad=True) for _ in range(3)]
    joined, thirds = torch.cat(parts, -1), Thirds(parts)
    assert (thirds.shape, thirds.dtype, thirds.size(-1)) == (joined.shape, joined.dtype, 12)
    for taken in (
        thirds.split(4, dim=2),
        thirds.split([4, 4, 4], -1),
        thirds.chunk(3, dim=-1),
        torch.chunk(thirds, 3, 2),
    ):
        assert all(one is part for one, part in zip(taken, parts, strict=True))
    assert torch.equal(thirds.view(2, 5, 3, 2, 2), joined.view(2, 5, 3, 2, 2))
    others: list[Any] = [
        lambda t: t.view(2, 5, 2, 6), lambda t: t.split(6, -1)[1], lambda t: t.chunk(2, -1)[0], lambda t: t * 2 + 1,
        lambda t: t.reshape(10, 12), lambda t: t[..., 3:9], lambda t: F.layer_norm(t, (12,)), lambda t: t.chunk(3)[0],
    ]  # fmt: skip
    for other in others:
        assert torch.equal(other(thirds), other(joined))
    (thirds * torch.arange(12.0)).sum().backward()
    assert torch.equal(parts[1].grad, torch.arange(4.0, 8.0).expand(2, 5, 4))
    with pytest.raises(ModelError, match=r"passed to a torch\.autograd\.Function, and its gradient would be lost"):
        Doubled.apply(Thirds(parts)).sum().backward()


# --- pipeline: placeholders, and where a model can be cut


def test_an_absent_tensor_has_a_form_and_no_values() -> None:
    x = placeholder((2, 3), torch.float64, torch.device("cpu"))
    mask = torch.tensor([[True, False, True], [True, True, False]])
    y = (x @ torch.ones(3, 5, dtype=torch.float64)).relu()
    assert type(y) is Placeholder
    assert form(y) == ((2, 5), torch.float64)
    assert (y.size(-1), y.device.type, y.dim(), x.T.shape, x[mask].shape) == (5, "cpu", 2, (3, 2), (4,))
    assert form(F.cross_entropy(y, torch.tensor([0, 1]))) == ((), torch.float64)
    for asked in (lambda: bool(x.sum() > 0), lambda: x.sum().item(), lambda: x.tolist(), lambda: x.nonzero()):
        with pytest.raises(ModelError, match="needs the values of another stage's result"):
            asked()
    here = torch.zeros(2, 3, dtype=torch.float64)
    for written in (lambda: here.add_(x), lambda: here.__setitem__(0, x[0]), lambda: torch.add(x, 1, out=here)):
        with pytest.raises(ModelError, match="writes another stage's result"):
            written()
    value = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    x.fill(value)
    total = (x * 2).sum()
    assert float(total.detach()) == 30
    total.backward()
    assert torch.equal(value.grad, torch.full((2, 3), 2.0, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"torch\.autograd\.Function, and the gradient would be lost"):
        Doubled.apply(x).sum().backward()


def recorded(model: nn.Module) -> tuple[Calls, Any]:
    data = Sentences()
    batch = torch.utils.data.default_collate([data[i] for i in range(4)])
    calls = Calls(model, torch.device("cpu"))

    def compute() -> list[Term]:
        loss = by_logits(model, batch)
        return [Term(loss.sum, loss.count)]

    with calls.intercepted():
        return calls, calls.record(compute)


def test_cuts_are_where_one_tensor_is_all_that_is_needed_later() -> None:
    model = Decoder()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    calls, record = recorded(model)
    names = [cut.name for cut in record.cuts]
    assert [name for name in names if name.count(".") == 1] == ["h.0", "h.1", "h.2"]
    assert "h.1.ln_2" in names, "between attention and MLP"
    assert not any("c_proj" in name or "leave" in name for name in names), "within a residual branch two are needed"
    assert "lm_head" in names
    assert calls.stretches(record)[0] == "wte"
    first, second = calls.holdings(record, [cut for cut in record.cuts if cut.name == "h.2"])
    assert any(p is model.wte.weight for p in first.parameters())
    assert any(p is model.wte.weight for p in second.parameters()), "the head is tied to it"
    assert {id(p) for p in second.parameters()} >= {id(p) for p in model.h[2].parameters()}
    assert not {id(p) for p in first.parameters()} & {id(p) for p in model.h[2].parameters()}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert type(model(torch.zeros(1, 3, dtype=torch.long)).logits) is Tensor


def test_places_are_found_without_a_run() -> None:
    data = Sentences()
    batch = torch.utils.data.default_collate([data[i] for i in range(4)])
    model = Repeated()
    assert [name for name in places_of(model, by_logits, batch) if "." not in name] == [
        *("embed", "layer#1", "layer#2", "layer#3", "layer#4", "head")
    ]
    assert float(by_logits(model, batch).sum.detach()) > 0


def test_calls_of_one_layer_have_numbers() -> None:
    calls, record = recorded(Repeated())
    names = calls.stretches(record)
    assert [name for name in names if name.startswith("layer#")] == ["layer#1", "layer#2", "layer#3", "layer#4"]
    size = dict(zip(names, calls.sizes(record), strict=True))
    assert size["layer#2"] == size["layer#3"] > 100, "it counts each time"


def test_what_a_layer_makes_of_the_examples_alone_is_made_anew() -> None:
    """A module that gives a mask must not be left out: what it gave was of other examples."""

    class Mask(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids > 3

    class Masked(Repeated):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Mask()

        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x = self.embed(input_ids) * self.mask(input_ids)[..., None]
            return Output(None, self.head(self.layer(x)[0]))

    model = Masked()
    calls, record = recorded(model)
    (made,) = [call for call in record.spans if calls.names[call[0]] == "mask"]
    assert record.spans[made].output is None
    (kept,) = [call for call in record.spans if calls.names[call[0]] == "embed"]
    assert record.spans[kept].output is not None


def test_a_cut_that_names_no_layer_is_refused_before_the_examples_are_seen() -> None:
    with pytest.raises(SettingError, match=r"no layer 'h\.3' at which a stage could begin. Did you mean h\."):
        check_names(Decoder(), "h.3", 2)
    with pytest.raises(SettingError, match="3 stages need 2 split point"):
        check_names(Decoder(), "h.1", 3)
    with pytest.raises(ModelError, match=r"1 layers .*too few for 2 stages"):
        check_names(nn.Sequential(nn.Linear(2, 2)), "", 2)
    check_names(Repeated(), "layer#3", 2)


# --- outputs as trees


def test_tensors_are_found_in_objects_that_torch_does_not_know() -> None:
    class Pair(NamedTuple):
        one: Any
        two: Any

    @dataclass(frozen=True)
    class Frozen:
        scores: Any

    class Items(dict[str, Any]):
        pass

    x = torch.ones(2)
    whole = Pair([x, {"a": Frozen(x)}], (Items(b=x), SimpleNamespace(c=x), Output(None, x), "text", 3))
    doubled = mapped(whole, Tensor, lambda t: t * 2)
    found: list[float] = []
    mapped(doubled, Tensor, lambda t: found.append(float(t.sum())) or t)
    assert found == [4.0] * 5
    assert type(doubled) is Pair
    assert type(doubled.two[0]) is Items
    assert float(whole.one[0].sum()) == 2.0, "the model's own object stays as it was"
    untouched = Pair([1], {"a": "b"})
    assert mapped(untouched, Tensor, lambda t: t * 2) is untouched
    assert holds(whole, (int,))
    assert not holds(Pair([x], {"a": True}), (int, float))
    assert form_of({"a": x, "b": [x, 1]}) == (("a", ((2,), torch.float32)), ("b", (((2,), torch.float32), "int")))
