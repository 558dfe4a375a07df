"""Accelerate: accumulation for a causal model, normalised by the tokens of the whole window on all processes."""

import contextlib

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PER_DEVICE = 3
WINDOW = 4
VOCAB = 26


def stories(n=192):
    g = torch.Generator().manual_seed(8)
    lengths = torch.randint(4, 22, (n,), generator=g).tolist()
    return [(torch.randint(0, VOCAB, (1,), generator=g) + torch.arange(k) ** 2) % VOCAB for k in lengths]


def collate(rows):
    ids = pad_sequence(rows, batch_first=True)
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.lm_head = nn.Linear(24, VOCAB)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def training_function():
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=WINDOW,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(3)
    model, loader = Recurrent(), DataLoader(stories(), PER_DEVICE, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) < WINDOW:
                continue
            items = torch.stack([(b["labels"][:, 1:] != -100).sum() for b in window]).sum()
            items = accelerator.gather(items.reshape(1)).sum().item()
            for i, b in enumerate(window):
                last = i == WINDOW - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(model):
                    logits = model(b["input_ids"])
                    loss = nn.functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
                    )
                    # backward divides by the window, DDP by the number of processes
                    loss = loss * WINDOW * accelerator.num_processes / items
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            window.clear()
        accelerator.print(f"epoch {epoch}: {items} items in the last window")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
