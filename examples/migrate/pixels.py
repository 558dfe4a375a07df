"""The digits as sentences of 64 words, for a small BERT: the word is how dark a pixel is, from 0 to 16."""

from __future__ import annotations

import torch
from job import digits
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification


class Sentences(Dataset[dict[str, Tensor]]):
    def __init__(self, train: bool) -> None:
        images, self.labels = digits()[0 if train else 1].tensors
        self.words = (images * 16).round().long().flatten(1)  # (examples, 64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return BertForSequenceClassification(config)
