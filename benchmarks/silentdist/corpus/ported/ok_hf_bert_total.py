"""A tiny BERT from transformers, masked tokens chosen for each example, the loss a sum and a count."""

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, DefaultDataCollator

import paceline

MASK, VOCAB = 3, 60


class Masked(Dataset):
    def __init__(self, n=144):
        self.ids = torch.randint(4, VOCAB, (n, 16), generator=torch.Generator().manual_seed(13))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i].clone()
        chosen = torch.rand(16) < 0.2
        labels = torch.where(chosen, ids, -100)
        ids[chosen] = MASK
        return {"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": labels}


def loss_fn(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"].flatten()
    return paceline.Total(F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum())


def main():
    run = paceline.start(seed=13)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(Masked(), global_batch=24, shuffle=True, collate_fn=DefaultDataCollator())
    for _ in run.epochs(1):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)


main()
