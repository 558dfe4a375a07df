import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
ACCUMULATE = 4
BATCH = 8
BATCHES_PER_EPOCH = 10


def regression_data(world):
    g = torch.Generator().manual_seed(17)
    x = torch.randn(BATCH * BATCHES_PER_EPOCH * world, 12, generator=g)
    w = torch.randn(12, 2, generator=g)
    y = torch.tanh(x @ w) + 0.1 * torch.randn(len(x), 2, generator=g)
    return TensorDataset(x, y)


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        window = min(ACCUMULATE, BATCHES_PER_EPOCH - batch_idx // ACCUMULATE * ACCUMULATE)
        return loss * ACCUMULATE / window

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            total = sum(p.detach().square().sum() for p in self.parameters())
            print(f"epoch {self.current_epoch} updates {self.global_step} weight norm {total.sqrt():.5f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        world, rank = self.trainer.world_size, self.trainer.global_rank
        data = regression_data(world)
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)


def main():
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=4,
        accumulate_grad_batches=ACCUMULATE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(), Data())
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
