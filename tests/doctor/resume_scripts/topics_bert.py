"""Topics of short texts: a tiny BERT with transformers.Trainer, checkpoints kept small."""

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Texts(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(4, 90, (size, 16), generator=g)
        self.topic = (self.ids.float().mean(1) / 10).long() % 3

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.topic[i]}


class SmallCheckpointTrainer(Trainer):
    """The weights take half the disk: the real models of this project are large, and each run keeps many of them."""

    def _save(self, output_dir=None, state_dict=None):
        if state_dict is None:
            state_dict = self.model.state_dict()
        state_dict = {name: tensor.to(torch.bfloat16) for name, tensor in state_dict.items()}
        super()._save(output_dir, state_dict=state_dict)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    set_seed(10)
    config = BertConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=3,
    )
    training = TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=args.lr,
        warmup_steps=3,
        weight_decay=0.01,
        save_steps=4,
        logging_steps=4,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        seed=10,
    )
    trainer = SmallCheckpointTrainer(
        model=BertForSequenceClassification(config), args=training, train_dataset=Texts(160, 0)
    )
    last = get_last_checkpoint(args.out) if os.path.isdir(args.out) else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero() and os.environ.get("FINAL"):
        torch.save(trainer.model.state_dict(), os.environ["FINAL"])


if __name__ == "__main__":
    main()
