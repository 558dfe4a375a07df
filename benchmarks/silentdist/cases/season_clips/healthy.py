"""Forecast the next frame of seasonal clips (Lightning Trainer).

torchrun --nproc-per-node 2 faulty.py
"""
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Clips(Dataset):
    def __init__(self, n=160, frames=6, cells=20):
        g = torch.Generator().manual_seed(4)
        speed = torch.rand(n, 1, 1, generator=g) * 2 + 0.5
        t = torch.arange(frames).view(1, frames, 1)
        x = torch.arange(cells).view(1, 1, cells) / 3
        self.video = torch.sin(x - speed * t) + 0.1 * torch.randn(n, frames, cells, generator=g)

    def __len__(self):
        return len(self.video)

    def __getitem__(self, i):
        return self.video[i, :-1], self.video[i, -1]


class ClipData(L.LightningDataModule):
    def __init__(self, batch_size=8, seed=31):
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage=None):
        self.clips = Clips()

    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        sampler = DistributedSampler(self.clips, num_replicas=world, rank=rank, shuffle=True,
                                     seed=self.seed)
        return DataLoader(self.clips, batch_size=self.batch_size, sampler=sampler)


class Forecaster(L.LightningModule):
    def __init__(self, frames=5, cells=20, lr=0.02):
        super().__init__()
        self.lr = lr
        self.mix = nn.Conv1d(frames, 16, 3, padding=1)
        self.out = nn.Conv1d(16, 1, 3, padding=1)

    def forward(self, past):
        return self.out(torch.tanh(self.mix(past))).squeeze(1)

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = nn.functional.mse_loss(self(past), future)
        self.log("train_mse", loss, sync_dist=True)
        return loss

    def on_train_end(self):
        self.print("last mse", float(self.trainer.callback_metrics["train_mse"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.8)


def main():
    L.seed_everything(9, verbose=False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    trainer.fit(Forecaster(), datamodule=ClipData())


if __name__ == "__main__":
    main()
