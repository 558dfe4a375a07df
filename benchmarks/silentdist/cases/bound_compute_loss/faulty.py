"""Curriculum training of a time-series classifier."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SeriesModel(nn.Module):
    def __init__(self, classes=3, width=24):
        super().__init__()
        self.conv = nn.Conv1d(1, width, 5, padding=2)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.answer = nn.Linear(width, classes)

    def encode(self, series):
        h = torch.relu(self.conv(series[:, None]))
        return self.rnn(h.transpose(1, 2))[1][-1]

    def forward(self, batch):
        return self.compute_loss(batch)

    def compute_loss(self, batch):
        series, label = batch
        return nn.functional.cross_entropy(self.answer(self.encode(series)), label)


def waves(stage, n=96, length=20):
    g = torch.Generator().manual_seed(40 + stage)
    label = torch.randint(0, 3, (n,), generator=g)
    t = torch.arange(length) / length
    clean = torch.sin(6.28 * (label[:, None] + 1) * t)
    return TensorDataset(clean + (0.2 + 0.2 * stage) * torch.randn(n, length, generator=g), label)


def stage_loader(stage, rank, world):
    data = waves(stage)
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, world, rank, seed=stage))


def create():
    torch.manual_seed(90)
    return SeriesModel()


class Curriculum:
    stages = (0, 1, 2)

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DDP(create())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def _core(self):
        return self.model.module if hasattr(self.model, "module") else self.model

    def _train_batch(self, batch):
        self.optimizer.zero_grad()
        loss = self._core().compute_loss(batch)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def run(self):
        for stage in self.stages:
            losses = [self._train_batch(b) for b in stage_loader(stage, self.rank, self.world)]
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"stage {stage} loss {mean.item() / self.world:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Curriculum().run()
    dist.barrier()
    dist.destroy_process_group()
