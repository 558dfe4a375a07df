"""Hugging Face Trainer with a loss function of its own: token classification, rare tags count more."""

import tempfile

import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments, set_seed

PER_DEVICE = 6
TAG_WEIGHTS = torch.tensor([0.4, 1.5, 2.0])


def notes(n=144):
    g = torch.Generator().manual_seed(16)
    rows = []
    for length in torch.randint(5, 16, (n,), generator=g).tolist():
        ids = torch.randint(1, 40, (length,), generator=g)
        tags = (ids > 28).long() + (ids > 34).long()
        tags[0] = -100
        rows.append({"input_ids": ids.tolist(), "labels": tags.tolist()})
    return rows


def collate(rows):
    size = max(len(r["input_ids"]) for r in rows)
    pad = lambda key, value: torch.tensor([r[key] + [value] * (size - len(r[key])) for r in rows])  # noqa: E731
    ids = pad("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": pad("labels", -100)}


def weighted_loss(outputs, labels, num_items_in_batch=None):
    """The Trainer counts the labels of the window on all processes and undoes the averaging of DDP."""
    each = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), TAG_WEIGHTS, reduction="none")
    return each.sum() / num_items_in_batch


def main():
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PER_DEVICE,
        gradient_accumulation_steps=3,
        max_steps=14,
        learning_rate=5e-3,
        adam_epsilon=1e-5,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    set_seed(17)
    config = DistilBertConfig(
        vocab_size=40, dim=24, n_layers=2, n_heads=3, hidden_dim=48, dropout=0.0, attention_dropout=0.0, num_labels=3
    )
    trainer = Trainer(
        model=DistilBertForTokenClassification(config),
        args=args,
        train_dataset=notes(),
        data_collator=collate,
        compute_loss_func=weighted_loss,
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} updates, loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
