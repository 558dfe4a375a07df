"""A tiny GPT-2 on an endless stream of melodies (IterableDataset), accumulation, cosine; transformers.Trainer."""

import argparse
import os

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

NOTES, MELODIES = 36, 160


class Melodies(IterableDataset):
    """Pass after pass over the same melodies, each in an order of its own."""

    def __init__(self, seed):
        self.seed = seed
        g = torch.Generator().manual_seed(seed)
        steps = torch.randint(-2, 3, (MELODIES, 20), generator=g)
        self.melodies = (torch.randint(0, NOTES, (MELODIES, 1), generator=g) + steps.cumsum(1)) % NOTES

    def __iter__(self):
        order = torch.Generator().manual_seed(self.seed + 1)
        while True:
            for i in torch.randperm(MELODIES, generator=order).tolist():
                yield {"input_ids": self.melodies[i], "labels": self.melodies[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()

    set_seed(6)
    config = GPT2Config(
        vocab_size=NOTES,
        n_positions=24,
        n_embd=24,
        n_layer=2,
        n_head=3,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.updates,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=4e-3,
            lr_scheduler_type="cosine",
            warmup_steps=3,
            max_grad_norm=0.5,
            save_steps=3,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Melodies(9),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    if trainer.is_world_process_zero() and os.environ.get("FINAL"):
        torch.save(trainer.model.state_dict(), os.environ["FINAL"])


main()
