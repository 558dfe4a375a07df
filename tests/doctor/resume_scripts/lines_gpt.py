"""A tiny GPT-2 on made-up lines of text, with transformers.Trainer; --model continues from a checkpoint folder."""

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LETTERS = 40


class Lines(Dataset):
    """Lines whose letters repeat with a period of their own."""

    def __init__(self, lines=208, length=24):
        g = torch.Generator().manual_seed(14)
        seeds = torch.randint(0, LETTERS, (lines, length), generator=g)
        period = torch.randint(2, 7, (lines, 1), generator=g)
        self.ids = seeds.gather(1, torch.arange(length)[None] % period)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def new_model():
    config = GPT2Config(
        vocab_size=LETTERS, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="checkpoints go here")
    parser.add_argument("--model", help="a checkpoint-N folder of an earlier run")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=55)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    if args.model:
        model = GPT2LMHeadModel.from_pretrained(args.model)
    else:
        model = new_model()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.out,
            num_train_epochs=2,
            per_device_train_batch_size=args.batch_size,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=4,
            save_strategy="steps",
            save_steps=5,
            logging_steps=5,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=args.seed,
        ),
        train_dataset=Lines(),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"trained to update {trainer.state.global_step}")
        if os.environ.get("FINAL"):
            torch.save(trainer.model.state_dict(), os.environ["FINAL"])


if __name__ == "__main__":
    main()
