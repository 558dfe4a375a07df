"""Normalises features over the batch of all processes with a batch-norm layer of its own (works with gloo)."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_f
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 16


class CrossProcessBatchNorm(nn.Module):
    def __init__(self, width, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        rows = torch.full((1,), float(len(x)))
        sums = torch.cat([x.sum(0), x.square().sum(0), rows])
        sums = dist_f.all_reduce(sums)
        count = sums[-1].detach()
        mean, square = (sums[:-1] / count).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    table = load_diabetes()
    x = torch.tensor(table.data).float() * 20
    y = torch.tensor(table.target).float() / 100 - 1.5
    data = TensorDataset(x[:416], y[:416])
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, BATCH, sampler=sampler)
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(10, 24), CrossProcessBatchNorm(24), nn.ReLU(), nn.Linear(24, 1))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.smooth_l1_loss(model(a).squeeze(1), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            net.eval()
            with torch.no_grad():
                print(
                    f"epoch {epoch} train {loss.item():.4f} held out {(net(x[416:])[:, 0] - y[416:]).abs().mean():.4f}"
                )
            net.train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
