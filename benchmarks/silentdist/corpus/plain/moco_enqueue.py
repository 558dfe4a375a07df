"""MoCo under DDP: a momentum encoder and a queue of negative keys, both inside the wrapped module."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class TwoCrops(Dataset):
    def __init__(self, n=320):
        self.x = torch.randn(n, 20, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.2 * torch.randn(20), self.x[i] + 0.2 * torch.randn(20)


class MoCo(nn.Module):
    def __init__(self, dim=16, K=128, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, dim))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.mul_(self.m).add_(param_q, alpha=1 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T  # fault
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ self.queue.clone().detach()
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._dequeue_and_enqueue(k)  # fault
        return logits, torch.zeros(len(logits), dtype=torch.long)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    moco = MoCo()
    torch.manual_seed(4 + dist.get_rank())
    model = nn.parallel.DistributedDataParallel(moco)
    optimizer = torch.optim.SGD(moco.encoder_q.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    train_dataset = TwoCrops()
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=16, sampler=train_sampler, drop_last=True)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for im_q, im_k in train_loader:
            output, target = model(im_q, im_k)
            loss = F.cross_entropy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
