"""Accelerate: accumulate(), clipping at the synchronised step and a prepared scheduler."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
WINDOW = 3
EPOCHS = 2


class Reviews(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 20)
        self.out = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.out(self.bag(ids)), labels)


def get_dataloader():
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 60, (192, 15), generator=g)
    return DataLoader(TensorDataset(ids, ids.sum(1) % 3), shuffle=True, batch_size=BATCH)


def main():
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=WINDOW,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(42)
    loader = get_dataloader()
    model = Reviews()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-6)
    # a prepared scheduler advances once per process at every update
    updates = len(loader) * EPOCHS // WINDOW
    scheduler = LambdaLR(optimizer, lambda s: max(0.1, 1 - s / updates))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(EPOCHS):
        model.train()
        for ids, labels in loader:
            with accelerator.accumulate(model):
                loss = model(ids, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
