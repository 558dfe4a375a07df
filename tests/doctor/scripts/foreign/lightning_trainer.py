"""Lightning's Trainer: accumulation, clipping, a schedule, metrics that it reduces."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, i):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, i):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)]


L.seed_everything(1)
x = torch.randn(68, 8)
y = (x.sum(1) > 0).long()
train = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=4, shuffle=True)
test = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=2)
t = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    logger=False,
    enable_checkpointing=False,
)
m = Lit()
t.fit(m, train, test)
if t.is_global_zero:
    print({k: float(v) for k, v in t.callback_metrics.items()})
