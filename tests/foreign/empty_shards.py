"""Hugging Face's models on the ranks of this process group, with a last global batch of one example."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from tests.foreign.functions import SEED, distance, started
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import paceline

COUNT, BATCH, EPOCHS, LENGTH, WORDS = 9, 4, 2, 7, 30
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 16, "num_labels": 3}


def dropout(p: float) -> dict[str, float]:
    return {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}


def bert_masked(p: float) -> nn.Module:
    return BertForMaskedLM(BertConfig(**TEXT, **dropout(p)))


def bert(p: float) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**TEXT, **dropout(p)))


def bert_eager(p: float) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**TEXT, **dropout(p), attn_implementation="eager"))


def recomputed(p: float) -> nn.Module:
    model = bert(p)
    model.gradient_checkpointing_enable()
    return model


def lora(p: float) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    how: dict[str, Any] = {"target_modules": ["query", "value"], "modules_to_save": ["pooler", "classifier"]}
    return get_peft_model(bert(p), LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False, **how))


def albert(p: float) -> nn.Module:
    config = AlbertConfig(**TEXT, embedding_size=8, **dropout(p), classifier_dropout_prob=p)
    return AlbertForSequenceClassification(config)


def distilbert(p: float) -> nn.Module:
    sizes: dict[str, Any] = {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 32, "vocab_size": WORDS}
    config = DistilBertConfig(**sizes, dropout=p, attention_dropout=p, seq_classif_dropout=p, num_labels=3)
    return DistilBertForSequenceClassification(config)


def gpt2(p: float) -> nn.Module:
    drops = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
    config = GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=WORDS, n_positions=16, num_labels=3, **drops)
    config.pad_token_id = 0
    return GPT2ForSequenceClassification(config)


def t5(p: float) -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes, vocab_size=WORDS, dropout_rate=p, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config)


def vit(p: float) -> nn.Module:
    return ViTForImageClassification(ViTConfig(**SIZES, **dropout(p), image_size=16, patch_size=8, num_labels=3))


def swin(p: float) -> nn.Module:
    sizes: dict[str, Any] = {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    return SwinForImageClassification(
        SwinConfig(**sizes, image_size=16, num_labels=3, drop_path_rate=0.0, **dropout(p))
    )


MODELS: dict[str, Callable[[float], nn.Module]] = {
    made.__name__: made
    for made in (bert_masked, bert, bert_eager, recomputed, lora, albert, distilbert, gpt2, t5, vit, swin)
}


class Examples(Dataset[dict[str, Tensor]]):
    """What each kind of model takes; the texts are of different lengths."""

    def __init__(self, model: str) -> None:
        g = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(1, WORDS, (COUNT, LENGTH), generator=g)
        mask = (torch.arange(LENGTH) < torch.arange(COUNT)[:, None] % 4 + 3).long()
        labels = torch.randint(3, (COUNT,), generator=g)
        images = torch.randn(COUNT, 3, 16, 16, generator=g, dtype=torch.float64)
        self.columns: dict[str, Tensor] = {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}
        if model in ("bert_masked", "t5"):
            self.columns["labels"] = tokens
        if model in ("vit", "swin"):
            self.columns = {"pixel_values": images, "labels": labels}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss  # all labels are tokens, equally many in each row: a mean over examples
    return loss


def built(model: str, p: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    found = MODELS[model](p).double().train()
    return found, torch.optim.SGD([w for w in found.parameters() if w.requires_grad], lr=0.05, momentum=0.9)


def plainly(model: str) -> nn.Module:
    found, optimizer = built(model)
    data = Examples(model)
    for _ in range(EPOCHS):
        for start in range(0, COUNT, BATCH):
            loss_fn(found, {name: column[start : start + BATCH] for name, column in data.columns.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def trained(model: str, strategy: str, form: str = "closure") -> float:
    """How far the weights are from a plain loop's."""
    original = plainly(model)
    with started(strategy=strategy or None) as run:
        found, optimizer = run.prepare(*built(model))
        run_epochs(run, found, optimizer, Examples(model), form)
        if run._strategy.plan.whole_shards:
            run._strategy.state_dict()  # a process of a pipeline has a part of the model: now it has all
        return distance(found, original)


def run_epochs(run: paceline.Run, model: nn.Module, optimizer: Any, data: Any, form: str) -> None:
    loader = run.loader(data, global_batch=BATCH)
    for _ in run.epochs(EPOCHS):
        for batch in loader:
            if form == "closure":
                run.forward_backward(loss_fn, model, batch)
            else:
                run.backward(loss_fn(model, batch))
            run.step(optimizer)


def all_trained(models: str, strategy: str, form: str) -> dict[str, float]:
    return {model: trained(model, strategy, form) for model in models.split()}


def dropped(model: str, strategy: str) -> list[float]:
    """Some of the weights, with dropout that belongs to the examples; and the predictions for all of them."""
    with started(strategy=strategy or None, noise="example") as run:
        found, optimizer = run.prepare(*built(model, p=0.2))
        run_epochs(run, found, optimizer, Examples(model), "closure")
        predicted = run.predict(found, Examples(model), global_batch=BATCH)
        sums = [p.detach().sum() for p in found.parameters()]
        return json.loads(json.dumps([float(s) for s in sums] + copy.copy(predicted.flatten().tolist())))
