"""Click model: embeddings with their own optimizer, the dense layers with another and another schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

USERS, ITEMS = 30, 50
BATCH = 32


class Clicks(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.dense = nn.Sequential(nn.Linear(2 * dim, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        return self.dense(torch.cat([u, i], 1)).squeeze(1) + (u * i).sum(1)


def log_file(rows=768):
    g = torch.Generator().manual_seed(14)
    user = torch.randint(0, USERS, (rows,), generator=g)
    item = (ITEMS * torch.rand(rows, generator=g) ** 2).long()  # a few items are shown very often
    return TensorDataset(user, item, ((user * item) % 7 < 3).float())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(15)
    model = DDP(Clicks())
    tables = [model.module.user.weight, model.module.item.weight]
    sparse_opt = torch.optim.Adagrad(tables, lr=0.1)
    dense_opt = torch.optim.RMSprop(model.module.dense.parameters(), lr=1e-3, eps=1e-4)
    dense_lr = torch.optim.lr_scheduler.LinearLR(dense_opt, 0.2, 1.0, total_iters=10)
    data = log_file()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (user, item, click) in enumerate(loader):
            loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), click)
            loss.backward()
            dense_opt.step()
            sparse_opt.step()
            dense_lr.step()
            model.zero_grad(set_to_none=True)
            if dist.get_rank() == 0 and step % 6 == 0:
                print(f"epoch {epoch} step {step} logloss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
