"""Hugging Face Trainer: sequence classification with label smoothing, warm-up and clipping."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

PER_DEVICE = 8


class Sentences(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 50, (size, 12), generator=g)
        self.labels = (self.ids[:, :4].sum(1) > self.ids[:, 4:8].sum(1)).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": self.labels[i]}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PER_DEVICE,
        max_steps=20,
        learning_rate=2e-3,
        adam_epsilon=1e-5,
        warmup_steps=4,
        max_grad_norm=0.5,
        label_smoothing_factor=0.1,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(args.seed)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Sentences(256, 0),
        eval_dataset=Sentences(51, 1),
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
