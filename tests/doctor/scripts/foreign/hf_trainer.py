"""transformers.Trainer: an evaluation that does not divide, accumulation, a schedule, label smoothing."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class D(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(5, 60, (n, 12), generator=g)
        self.y = self.x.sum(1) % 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": self.y[i]}


def metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, 1) == p.label_ids).mean())}


set_seed(3)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
)
args = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    label_smoothing_factor=0.1,
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
t = Trainer(model, args, train_dataset=D(70, 0), eval_dataset=D(21, 1), compute_metrics=metrics)
t.train()
print(t.evaluate())
