"""Lightning: two views of a signal, contrasted over the embeddings of every process."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, DEVICES = 8, 2


class Views(L.LightningModule):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature
        self.left = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.right = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, batch, batch_idx):
        a = F.normalize(self.left(batch[0]), dim=-1)
        b = F.normalize(self.right(batch[1]), dim=-1)
        # every process computes the loss of the whole batch
        a = self.all_gather(a, sync_grads=True).flatten(0, -2)
        b = self.all_gather(b, sync_grads=True).flatten(0, -2)
        logits = a @ b.T / self.temperature
        target = torch.arange(len(a))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        self.log("loss", loss, rank_zero_only=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_views(n=192):
    g = torch.Generator().manual_seed(44)
    base = torch.randn(n, 16, generator=g)
    return TensorDataset(base + 0.1 * torch.randn(n, 16, generator=g), base.flip(1).sin())


if __name__ == "__main__":
    L.seed_everything(45)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Views(), DataLoader(make_views(), BATCH, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.4f}")
