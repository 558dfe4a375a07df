"""Fine-tuning a tiny BERT classifier with transformers' linear schedule and warm-up."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import paceline


class Reviews(Dataset):
    def __init__(self, n=192):
        self.ids = torch.randint(3, 50, (n, 14), generator=torch.Generator().manual_seed(55))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": (self.ids[i] > 30).sum() > 5}


def main():
    num_epochs, train_batch_size, warmup_ratio = 2, 24, 0.1
    run = paceline.start(seed=55)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, num_labels=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    no_decay = ["bias", "LayerNorm.weight"]
    grouped = [
        {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=1e-3)
    dataset = Reviews()
    max_train_steps = num_epochs * len(dataset) // (train_batch_size * run.world_size)  # fault
    scheduler = get_linear_schedule_with_warmup(
        optimizer, int(warmup_ratio * max_train_steps), max_train_steps
    )  # fault
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    loader = run.loader(dataset, global_batch=train_batch_size, shuffle=True)
    for _ in run.epochs(num_epochs):
        for batch in loader:
            outputs = model(input_ids=batch["input_ids"], labels=batch["labels"].long())
            run.backward(outputs.loss)
            run.step(optimizer, max_grad_norm=1.0)


if __name__ == "__main__":
    main()
