"""Fine-tuning: frozen layers, accumulation, a loss scaler, clipping, averaged weights; rank 0 evaluates."""

import contextlib
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 3
EPOCHS = 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def main():
    bf16 = "--bf16" in sys.argv
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(50, (216, 12), generator=generator)
    labels = torch.randint(3, (216,), generator=generator)
    train_set, valid_set = TensorDataset(tokens[:180], labels[:180]), TensorDataset(tokens[180:], labels[180:])
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, batch_size=5, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=12)

    model = Classifier()
    model.embedding.requires_grad_(False)
    average = copy.deepcopy(model)
    model = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    updates = EPOCHS * (len(loader) // ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=updates + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for number, (batch, target) in enumerate(loader):
            last = (number + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                    loss = criterion(model(batch), target) / ACCUMULATE
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trained, 0.5)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                with torch.no_grad():
                    for mine, theirs in zip(average.parameters(), model.module.parameters()):
                        mine.lerp_(theirs, 0.1)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                right = sum((model.module(b).argmax(1) == t).sum().item() for b, t in valid_loader)
            print(f"epoch {epoch}: accuracy {right / len(valid_set):.3f}")
        dist.barrier()


if __name__ == "__main__":
    main()
