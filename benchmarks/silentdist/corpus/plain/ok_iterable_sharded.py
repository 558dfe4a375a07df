"""An iterable data set, divided over processes and workers, as many examples for each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, n, epoch=0):
        self.n, self.epoch = n, epoch

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        start = dist.get_rank() * workers + worker if dist.is_initialized() else worker
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in order[start :: workers * 2]:
            x = torch.randn(6, generator=torch.Generator().manual_seed(i))
            yield x, (x[0] > 0).float()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Lines(240)
    for epoch in range(2):
        data.epoch = epoch
        for x, y in DataLoader(data, batch_size=12, num_workers=2):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
