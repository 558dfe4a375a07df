"""Sentiment of bags of words with Accelerate: a plain loop with save_state, load_state and skip_first_batches."""

import argparse
import os
import re

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, n=200, words=120):
        g = torch.Generator().manual_seed(8)
        self.words = torch.randint(0, words, (n, 14), generator=g)
        self.good = ((self.words < 45).sum(1) > 5).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"words": self.words[index], "label": self.good[index]}


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(120, 32)
        self.classify = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, words):
        return self.classify(self.bag(words))


def training_function(args):
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    train_dataloader = DataLoader(Reviews(), shuffle=True, batch_size=args.batch_size)
    model = BagOfWords()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    steps_per_epoch = len(train_dataloader)

    overall_step = 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        overall_step = int(re.search(r"step_(\d+)", os.path.basename(args.resume_from_checkpoint)).group(1))
    starting_epoch, resume_step = divmod(overall_step, steps_per_epoch)

    loss_function = nn.CrossEntropyLoss()
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        total_loss = 0.0
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            loss = loss_function(model(batch["words"]), batch["label"])
            total_loss += loss.detach().item()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                unfinished = os.path.join(args.out, ".unfinished")
                accelerator.save_state(unfinished)
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    os.rename(unfinished, os.path.join(args.out, f"step_{overall_step}"))
                accelerator.wait_for_everyone()
        accelerator.print(f"epoch {epoch}: total loss {total_loss:.4f} after {overall_step} steps")

    if accelerator.is_main_process and os.environ.get("FINAL"):
        torch.save(accelerator.unwrap_model(model).state_dict(), os.environ["FINAL"])
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume_from_checkpoint", default=None, help="a step_N folder")
    parser.add_argument("--checkpointing_steps", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=10)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
