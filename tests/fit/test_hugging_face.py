"""fit, evaluate and predict with Hugging Face models, collators and data sets, beside loops over whole batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("transformers", reason="Hugging Face's models are what is tested: make conformance installs them")
pytest.importorskip("datasets", reason="Hugging Face's data sets are what is tested: make conformance installs them")

import torch
from datasets import Dataset
from tests.fit.problem import near, started
from tests.foreign.scripts.bert_tokens import LINES, make_tokenizer
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import paceline
from paceline.data.randomness import permutation
from paceline.errors import SettingError, UsageError
from paceline.fitting import model_loss
from paceline.fitting.model_loss import ModelLoss

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(240)]
N, BATCH, EPOCHS = 14, 6, 2
TOKENIZER = make_tokenizer()


def rows(kind: str) -> Dataset:
    """Texts of different lengths, and what Hugging Face's tutorials make of them; the text stays in, as there."""

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        encoded = TOKENIZER(row["text"])
        found = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        if kind == "tokens":
            found["labels"] = [token % 3 if token % 5 else -100 for token in encoded["input_ids"]]
        elif kind == "classes":
            found["label"] = len(row["text"]) % 3
        return found

    return Dataset.from_dict({"text": [LINES[5 * i % len(LINES)] for i in range(N)]}).map(encode)


def bert(cls: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    return cls(
        BertConfig(
            vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, **more,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(TOKENIZER), n_positions=32, n_embd=16, n_layer=1, n_head=2, **none)
    )


CASES = {
    "gpt2, causal": (gpt2, "text", DataCollatorForLanguageModeling(TOKENIZER, mlm=False)),
    "tokens": (lambda: bert(BertForTokenClassification), "tokens", DataCollatorForTokenClassification(TOKENIZER)),
    "classes": (lambda: bert(BertForSequenceClassification), "classes", DataCollatorWithPadding(TOKENIZER)),
}


def by_hand(make: Any, kind: str, collate: Any) -> tuple[nn.Module, list[float]]:
    """model(**batch).loss over whole global batches, where the mean over tokens is that of the global batch."""
    model, data = make(), rows(kind).remove_columns("text")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for epoch in range(EPOCHS):
        for part in torch.from_numpy(permutation(N, 0, "train", epoch)).split(BATCH):
            loss = model(**collate([data[i] for i in part.tolist()])).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


def fitted(make: Any, kind: str, collate: Any, strategy: str | None = None, **options: Any) -> Any:
    with started(strategy=strategy) as run:
        model = make()
        history = paceline.fit(
            model, None, rows(kind), optimizer=torch.optim.SGD(model.parameters(), lr=0.3), global_batch=BATCH,
            epochs=EPOCHS, collate_fn=collate, run=run, **options,
        )  # fmt: skip
        return model, history


@pytest.mark.ranks(conformance=(1, 2))
@pytest.mark.parametrize("case", CASES)
def test_a_models_own_loss_is_weighted_by_what_it_is_a_mean_over(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        expected, _ = by_hand(*CASES[case])
        for options in ({"micro_batch": 2}, {"micro_batch": 1}):
            model, _ = fitted(*CASES[case], **options)
            near(model, expected, 2e-6)


@pytest.mark.ranks(conformance=2)
def test_under_fsdp() -> None:
    expected, _ = by_hand(*CASES["tokens"])
    kept: list[Any] = []

    class Keep(paceline.Callback):
        def on_end(self, fit: Any) -> None:
            kept.extend(p.full_tensor() if hasattr(p, "full_tensor") else p for p in fit.model.parameters())

    fitted(*CASES["tokens"], strategy="fsdp", micro_batch=2, callbacks=[Keep()])
    for own, wanted in zip(kept, expected.parameters(), strict=True):
        near(own, wanted, 2e-6)


@pytest.mark.ranks(1, conformance=2)
def test_evaluate_and_predict() -> None:
    make, kind, collate = CASES["classes"]
    model = make()
    data = rows(kind)
    whole = collate([data.remove_columns("text")[i] for i in range(N)])
    with torch.no_grad():
        expected = model(**whole)
    metric = MulticlassAccuracy(3, average="micro")

    def first(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return outputs.logits.argmax(1), batch["labels"]

    right = (expected.logits.argmax(1) == whole["labels"]).double().mean().item()
    with started() as run:
        run.prepare(model)
        for target in (None, "labels", first):
            found = paceline.evaluate(
                model, None, data, global_batch=4, collate_fn=collate, metrics={"accuracy": metric}, target=target
            )
            assert found["accuracy"] == pytest.approx(right)
            assert found["loss"] == pytest.approx(expected.loss.item(), abs=1e-6)
        logits = run.predict(model, data.remove_columns("text"), global_batch=4, collate_fn=collate)
        near(logits, expected.logits, 1e-5)
        with pytest.raises(UsageError, match=r"needs 'label' in the batch\. Did you mean 'labels'"):
            paceline.evaluate(
                model, None, data, global_batch=4, collate_fn=collate, metrics={"a": metric}, target="label"
            )
        with pytest.raises(SettingError, match="target=3"):
            paceline.evaluate(model, None, data, global_batch=4, target=3)  # type: ignore[arg-type]


def test_what_the_loss_is_a_mean_over() -> None:
    ids = torch.randint(3, len(TOKENIZER), (3, 7), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = labels[1, 6:] = -100
    torch.manual_seed(3)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=len(TOKENIZER), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
                 decoder_start_token_id=0)
    )  # fmt: skip
    for model, given, count in (
        (bert(BertForMaskedLM), labels, 16),
        (t5, labels, 16),
        (gpt2(), labels, int((labels[:, 1:] != -100).sum())),
        (bert(BertForNextSentencePrediction), torch.tensor([0, 1, 0]), 3),
    ):
        own = ModelLoss()
        batch = {"input_ids": ids, "labels": given}
        for _ in range(2):  # found out, and known
            total = own(model, batch)
            assert isinstance(total, paceline.Total)
            assert int(total.count) == count, type(model)
            torch.testing.assert_close(total.sum / count, model(**batch).loss)
    nothing = own(bert(BertForMaskedLM), {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    assert (float(nothing.sum.detach()), int(nothing.count)) == (0.0, 0)
    nothing.sum.backward()
    regression = bert(BertForSequenceClassification, problem_type="multi_label_classification")
    found = ModelLoss()(regression, {"input_ids": ids, "labels": torch.ones(3, 3)})
    assert isinstance(found, Tensor)


def test_it_is_found_out_once_also_of_an_untrained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    mean = model_loss._mean
    monkeypatch.setattr(model_loss, "_mean", lambda *given: looked.append(given[-1]) or mean(*given))  # type: ignore[func-returns-value]
    ids = torch.randint(3, len(TOKENIZER), (3, 7), generator=torch.Generator().manual_seed(2))
    own, model = ModelLoss(), gpt2()
    nothing = {"loss": torch.tensor(torch.nan), "logits": torch.zeros(3, 7, len(TOKENIZER))}
    assert torch.isnan(own(Dicts(**nothing), {"x": ids, "labels": ids}).sum)  # type: ignore[union-attr]
    for _ in range(3):
        assert int(own(model, {"input_ids": ids, "labels": ids}).count) == 18  # type: ignore[union-attr]
    assert looked == [0, 1] * 2  # of the loss that tells nothing, and of the first that does


class Dicts(nn.Module):
    """As a model of Hugging Face's, but with what it is told to return."""

    def __init__(self, **returned: Any) -> None:
        super().__init__()
        self.weight, self.returned = nn.Parameter(torch.ones(())), returned

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Mapping[str, Any]:
        return {name: value * self.weight for name, value in self.returned.items()}


def test_what_cannot_be_known_is_said() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(UsageError, match="the batch is a list"):
        ModelLoss()(Dicts(), [x, x])
    with pytest.raises(UsageError, match=r"Dicts returned no loss for a batch with the keys x\. Add the labels"):
        ModelLoss()(Dicts(), {"x": x})
    with pytest.warns(UserWarning, match="the batch has no 'labels'"):
        ModelLoss()(Dicts(loss=torch.tensor(1.0)), {"x": x})
    with pytest.raises(
        UsageError, match=r"its labels is 1\.099\. So Paceline does not know what the loss averages over"
    ):
        ModelLoss()(Dicts(loss=torch.tensor(5.0), logits=x), {"x": x, "labels": torch.tensor([0, 1])})
    ids = torch.ones(2, 5, dtype=torch.int64)
    two = _Named(bert(BertForPreTraining))
    with pytest.raises(UsageError, match="further terms"):
        ModelLoss()(two, {"input_ids": ids, "labels": ids, "next_sentence_label": torch.tensor([0, 1])})
    data = [{"x": torch.zeros(3), "labels": torch.tensor(0.5)}] * 2
    metric = {"accuracy": MulticlassAccuracy(3)}
    with started() as run:
        model = run.prepare(Dicts(loss=torch.tensor(1.0), boxes=x))
        with pytest.raises(UsageError, match="a dict with loss, boxes, and Paceline does not know which part"):
            paceline.evaluate(model, None, data, global_batch=2, metrics=metric)


class _Named(nn.Module):
    """BertForPreTraining calls its logits prediction_logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        out = self.model(**batch)
        return {"loss": out.loss, "logits": out.prediction_logits}
