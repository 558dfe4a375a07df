"""`tensor` and `pipeline` on models as people bring them (brought.py), on several processes: against plain PyTorch on
the whole global batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.strategies.brought import (
    BATCH,
    EPOCHS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Decoder,
    Function,
    N,
    Noisy,
    Optional,
    Output,
    Reading,
    Repeated,
    Sentences,
    Writing,
    by_class,
    by_logits,
    by_the_model,
    decayed,
    halves,
    images,
    make,
    noisy,
    penalized,
    plainly,
    refused,
    scored,
    sized,
    trained,
    with_mask,
)
from tests.strategies.checks import same, started, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import paceline
from paceline.errors import ModelError, SettingError, UsageError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.ranks(2, campaign=4)
def test_tensor_cuts_fused_attention_and_transposed_layers() -> None:
    same(trained(Decoder, by_the_model, sized("tensor"), loop=True), plainly(Decoder, by_the_model))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_tensor_trains_tied_embeddings_with_adam() -> None:
    same(trained(Decoder, by_logits, sized("tensor"), adam=True), plainly(Decoder, by_logits, True), 1e-8)


@pytest.mark.ranks(conformance=2, campaign=4)
def test_tensor_reads_q_k_and_v_however_they_are_taken_apart() -> None:
    for how in ("view", "whole"):
        same(
            trained(lambda how=how: Decoder(how=how), by_logits, sized("tensor")),
            plainly(lambda how=how: Decoder(how=how), by_logits),
        )


@pytest.mark.ranks(conformance=2, campaign=4)
def test_tensor_cuts_a_layer_that_is_called_many_times() -> None:
    same(trained(Repeated, by_the_model, sized("tensor"), micro=2), plainly(Repeated, by_the_model))


@pytest.mark.ranks(2, campaign=4)
def test_tensor_cuts_grouped_convolutions_by_groups() -> None:
    same(trained(halves, by_class, sized("tensor"), loop=True), plainly(halves, by_class))
    with started(strategy=sized("tensor")) as run:
        model, _ = run.prepare(*make(halves, False))
        kinds = [isinstance(layer.weight, DTensor) for layer in model if isinstance(layer, nn.Conv2d)]
        assert kinds == [False, True, True, True], kinds
        assert tuple(model[3].weight.to_local().shape) == (4, 4, 3, 3)


@pytest.mark.ranks(conformance=2, campaign=4)
def test_tensor_takes_a_plan_for_these_layers() -> None:
    plan = {"h.*.attn.c_attn": "qkv", "h.*.attn.c_proj": "row", "h.0.inner.enter": "gather", "wte": "row"}
    spec = paceline.strategy("tensor", size=2, plan=plan)
    same(trained(Decoder, by_logits, spec), plainly(Decoder, by_logits))
    text = "tensor:size=2,plan=h.*.inner.enter:column,h.*.inner.leave:row,lm_head:gather,h.1.attn.c_attn:column"
    same(trained(Decoder, by_logits, text), plainly(Decoder, by_logits))
    convolutions = "tensor:size=2,plan=1:column,3:column,6:gather,8:column"
    same(trained(halves, by_class, convolutions), plainly(halves, by_class))
    pair = "tensor:size=2,plan=1:column,3:row"
    same(trained(lambda: halves(1), by_class, pair), plainly(lambda: halves(1), by_class))


@pytest.mark.ranks(2, campaign=4)
def test_tensor_says_what_it_leaves_whole_and_refuses_it_in_a_plan() -> None:
    def odd() -> nn.Module:
        return Decoder(heads=1)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same(trained(odd, by_logits, sized("tensor")), plainly(odd, by_logits))
    texts = [str(w.message) for w in said if "left whole" in str(w.message)]
    assert len(texts) == int(dist.get_rank() == 0), texts
    assert all("h.0.attn (c_attn, c_proj) has 1 heads, which 2 devices" in text and "1 more" in text for text in texts)
    for plan, build, words in (
        ("h.*.attn.c_attn:qkv", odd, ["h.0.attn.c_attn:qkv: h.0.attn has 1 heads", "another size"]),
        ("wte:qkv", Decoder, ["the layer wte is a Embedding", "Use column or row"]),
        ("h.*.attn.c_proj:qkv", Decoder, ["out_features=8", "three equal parts"]),
        ("h.*.ln_1:row", Decoder, ["is a LayerNorm", "x @ weight + bias"]),
        ("h.*.attn.q:column", Decoder, ["h.*.attn.q fits no layer", "h.0.attn.c_attn"]),
    ):
        refused(build, by_logits, f"tensor:size=2,plan={plan}", ModelError, *words)
    refused(halves, by_class, "tensor:size=2,plan=3:row", ModelError, "is a grouped convolution", "column or gather")
    refused(lambda: halves(1), by_class, "tensor:size=2,plan=11:column,12:gather", ModelError)


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_takes_keywords_masks_and_objects() -> None:
    same(trained(Decoder, by_the_model, sized("pipeline"), micro=2), plainly(Decoder, by_the_model))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_takes_them_with_adam_and_other_micro_batches() -> None:
    for micro in (None, 1):
        ours = trained(Decoder, by_logits, sized("pipeline"), micro=micro, adam=True)
        same(ours, plainly(Decoder, by_logits, True), 1e-8)


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_cuts_between_calls_of_one_layer() -> None:
    same(trained(Repeated, by_logits, "pipeline:stages=2,cut=layer#3", micro=2), plainly(Repeated, by_logits))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_schedules_stretches_that_share_a_layer() -> None:
    reference = plainly(Repeated, by_logits)
    for options in ("stages=2", "stages=2,schedule=1f1b,balance=cost", "schedule=1f1b", "stages=2,schedule=naive"):
        same(trained(Repeated, by_logits, f"pipeline:{options}", micro=1), reference)


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_takes_a_first_stage_that_is_frozen() -> None:
    def frozen() -> nn.Module:
        model = Repeated()
        model.embed.requires_grad_(False)
        return model

    name = "pipeline:stages=2,cut=layer#1"
    same(trained(frozen, by_logits, name, micro=2), plainly(frozen, by_logits))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_takes_an_optional_argument_or_does_without() -> None:
    for loss_fn in (by_class, with_mask):
        with started(strategy="pipeline:stages=2,cut=layers.2") as run:
            model, optimizer = run.prepare(*make(Optional, False))
            plain, plain_optimizer = make(Optional, False)
            for batch in run.loader(images(), global_batch=N, micro_batch=2):
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
            loss_fn(plain, list(images().tensors)).backward()
            plain_optimizer.step()
            same(whole(run, model, make(Optional, False)[0]), plain)


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_recomputes_activations() -> None:
    """torch's checkpoint around the layers: what a backward calls again is not taken for a forward."""

    class Recomputing(Repeated):
        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x = self.embed(input_ids) * 0.3
            for _ in range(4):
                x, _ = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
            return scored(self.head(x), labels)

    for schedule in ("gpipe", "1f1b"):
        name = f"pipeline:stages=2,schedule={schedule}"
        same(trained(Recomputing, by_logits, name, micro=1), plainly(Recomputing, by_logits))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_keeps_batch_norm_where_it_is_computed() -> None:
    """Running statistics move once a step, with the whole batch, and by the stage that computes them."""

    class Normed(Repeated):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(LENGTH), nn.BatchNorm1d(LENGTH)

        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x, _ = self.layer(self.first(self.embed(input_ids)))
            return scored(self.head(self.second(x)), labels)

    ours, plain = trained(Normed, by_logits, "pipeline:stages=2,cut=second"), plainly(Normed, by_logits)
    same(ours, plain)
    assert float(ours.first.running_mean.abs().sum()) > 0
    assert int(ours.second.num_batches_tracked) == EPOCHS * -(-N // BATCH)


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_sums_the_gradients_of_tied_embeddings() -> None:
    with started(strategy="pipeline:stages=2,cut=h.2") as run:
        model, optimizer = run.prepare(*make(Decoder, False))
        for batch in run.loader(Sentences(), global_batch=BATCH):
            run.forward_backward(by_logits, model, batch)
            first = run._strategy.mesh.coordinate("stage") == 0
            assert (model.wte.weight.grad is not None) == first, "the first stage is its owner"
            assert model.wte.weight.numel() > 0, "the last stage needs it too"
            assert (model.h[2].inner.enter.weight.numel() > 0) == (not first)
            run.step(optimizer)
        same(whole(run, model, make(Decoder, False)[0]), plainly(Decoder, by_logits))


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_evaluates_before_and_between_steps() -> None:
    data = Sentences()
    batch = torch.utils.data.default_collate([data[i] for i in range(N)])
    for when in (0, 1):
        with started(strategy="pipeline:stages=2") as run:
            model, optimizer = run.prepare(*make(Decoder, False))
            plain, plain_optimizer = make(Decoder, False)
            for number, piece in enumerate(run.loader(Sentences(), global_batch=N)):
                if number == when - 1:
                    run.forward_backward(by_logits, model, piece)
                    run.step(optimizer)
                    loss = by_logits(plain, batch)
                    (loss.sum / loss.count).backward()
                    plain_optimizer.step()
                with torch.no_grad():
                    found, expected = model(**batch).logits, plain(**batch).logits
                assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_draws_alike_before_the_first_layer() -> None:
    for micro in (None, 1):
        with started(strategy="pipeline:stages=2") as run:
            model, optimizer = run.prepare(*make(Noisy, False))
            for batch in run.loader(Sentences(), global_batch=BATCH, micro_batch=micro):
                run.forward_backward(noisy, model, batch)
                run.step(optimizer)
                everyone: list[Any] = [None] * run.world.size
                dist.all_gather_object(everyone, model.seen)
                row = run.world.rank // 2 * 2
                assert torch.equal(everyone[row], everyone[row + 1])


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_makes_anew_what_a_layer_makes_of_the_examples() -> None:
    """A layer that gives a mask beside what it computes: the mask that it gave was of other examples."""

    class Begin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, WIDTH)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            mask = attention_mask.bool()[:, None, None, :] | torch.eye(input_ids.shape[1]).bool()
            return self.table(input_ids) * 0.3, mask

    class Mixed(Repeated):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Begin()

        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x, mask = self.embed(input_ids, attention_mask)
            for _ in range(4):
                x, _ = self.layer(x, attention_mask=mask)
            return scored(self.head(x), labels)

    same(trained(Mixed, by_logits, "pipeline:stages=2,cut=layer#3"), plainly(Mixed, by_logits))


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_refuses_what_it_would_compute_wrongly_or_not_at_all() -> None:
    name = "pipeline:stages=2"
    refused(Reading, by_logits, name, ModelError, "needs the values of another stage", "__bool__", "strategy='ddp'")
    refused(Writing, by_logits, name, ModelError, "writes another stage's result", "__setitem__")
    refused(Repeated, penalized, name, ModelError, "differentiates with respect to a tensor of another stage")
    same(trained(Repeated, decayed, name), plainly(Repeated, decayed))
    for cut, words in (
        ("h.7", ["no layer 'h.7'", "Did you mean h."]),
        ("h.1,h.2", ["2 stages need 1 split point"]),
        ("h.1.attn.c_proj", ["or names of:", "h.1,"]),
        ("999", ["from 1 to"]),
    ):
        refused(Decoder, by_logits, f"{name},cut={cut}", SettingError, *words)
    refused(Repeated, by_logits, f"{name},cut=layer#9", SettingError, "layer#2", "layer#4")


@pytest.mark.ranks(2, campaign=4)
def test_pipeline_loses_no_gradient_of_a_function_of_ones_own() -> None:
    """In the layer with which a stage begins, which gets what was received."""

    class Within(Repeated):
        def __init__(self) -> None:
            super().__init__()
            self.function = Function()

        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x, _ = self.layer(self.embed(input_ids) * 0.3)
            return scored(self.head(x + self.function(x)), labels)

    name = "pipeline:stages=2,cut=function"
    same(trained(Within, by_logits, name), plainly(Within, by_logits))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_pipeline_refuses_a_second_closure_that_uses_other_layers() -> None:
    class Heads(Repeated):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
            x = self.layer(self.layer(self.embed(input_ids))[0])[0]
            return scored((self.head if labels is not None else self.other)(x), labels)

    with started(strategy="pipeline:stages=2") as run:
        model, _ = run.prepare(*make(Heads, False))
        for batch in run.loader(Sentences(), global_batch=BATCH):
            run.forward_backward(by_the_model, model, batch)
            try:
                run.forward_backward(by_logits, model, batch)
            except UsageError as error:
                assert "uses other.weight, other.bias in stage 1, which did not use it" in str(error), error
            else:
                raise AssertionError
            break


@pytest.mark.ranks(2, campaign=4)
def test_a_pipeline_of_more_stages_than_layers_is_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(32, 3)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Output:
            return Output(None, self.one(x))

    refused(Two, by_class, "pipeline:stages=2", ModelError, "1 layers (one), too few for 2 stages")
