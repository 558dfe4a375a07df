"""Intents of spoken commands: a tiny BERT with dropout, evaluated on the way, transformers.Trainer."""

import argparse
import os

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


class Commands(Dataset):
    """Commands of unequal length; the collator pads them."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(6, 14, (1,), generator=g))
            ids = torch.randint(1, 60, (length,), generator=g).tolist()
            self.items.append({"input_ids": ids, "labels": max(ids) % 4})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Padded:
    def __call__(self, items):
        longest = max(len(item["input_ids"]) for item in items)
        ids = torch.tensor([item["input_ids"] + [0] * (longest - len(item["input_ids"])) for item in items])
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([item["labels"] for item in items]),
        }


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    set_seed(3)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=60,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=48,
            hidden_dropout_prob=0.15,
            max_position_embeddings=20,
            num_labels=4,
        )
    )
    training = TrainingArguments(
        args.out,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=1e-3,
        warmup_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        save_total_limit=4,
        logging_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model, training, Padded(), Commands(184, 0), Commands(48, 1), compute_metrics=accuracy)
    last = get_last_checkpoint(args.out) if os.path.isdir(args.out) else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero() and os.environ.get("FINAL"):
        torch.save(trainer.model.state_dict(), os.environ["FINAL"])


if __name__ == "__main__":
    main()
