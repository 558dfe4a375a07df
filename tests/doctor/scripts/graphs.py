"""Labels of nodes, on graphs that a collate puts side by side, as PyTorch Geometric's Batch does: each rank's batch has
as many graphs, and another number of nodes. The loss is a mean over the nodes of all ranks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Batch:
    """Graphs side by side: one graph of several parts."""

    def __init__(self, graphs):
        starts = torch.tensor([0, *(len(x) for x, _, _ in graphs)]).cumsum(0)
        self.x = torch.cat([x for x, _, _ in graphs])
        self.y = torch.cat([y for _, y, _ in graphs])
        self.edges = torch.cat([edges + start for (_, _, edges), start in zip(graphs, starts)], dim=1)
        self.part = torch.cat([torch.full((len(x),), n) for n, (x, _, _) in enumerate(graphs)])
        self.graphs = len(graphs)


class Graphs(Dataset):
    def __len__(self):
        return 24 * dist.get_world_size()

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        nodes = int(torch.randint(4, 20, (), generator=generator))
        x = torch.randn(nodes, 5, generator=generator)
        return x, x[:, :3].argmax(1), torch.randint(0, nodes, (2, 3 * nodes), generator=generator)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near, self.head = nn.Linear(5, 16), nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, batch):
        sources, targets = batch.edges
        messages = self.near(batch.x)[sources]
        near = torch.zeros(len(batch.x), 16, dtype=messages.dtype).index_add(0, targets, messages)
        return self.head((self.own(batch.x) + near).relu())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = Graphs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=Batch)
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            nodes = torch.tensor(float(len(batch.x)))
            dist.all_reduce(nodes)
            with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                out = model(batch)
            loss = nn.functional.cross_entropy(out.float(), batch.y)
            loss = loss * (world_size * len(batch.x) / nodes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


main()
