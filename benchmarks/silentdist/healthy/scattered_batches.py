"""Only process 0 has the data set; it cuts every batch and scatters the pieces."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn

PIECE = 12
STEPS = 24


class Source:
    def __init__(self, world):
        table = load_breast_cancer()
        x = torch.tensor(table.data).float()
        y = torch.tensor(table.target).float().unsqueeze(1)
        self.rows = torch.cat([(x - x.mean(0)) / x.std(0), y], 1)
        self.size = PIECE * world
        self.world = world
        self.generator = torch.Generator().manual_seed(64)

    def next(self):
        chosen = torch.randperm(len(self.rows), generator=self.generator)[: self.size]
        return list(self.rows[chosen].chunk(self.world))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    source = Source(world) if rank == 0 else None
    model = nn.Sequential(nn.Linear(30, 18), nn.ReLU(), nn.Linear(18, 1))
    if rank == 0:
        torch.manual_seed(65)
        for layer in (model[0], model[2]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        piece = torch.empty(PIECE, 31)
        dist.scatter(piece, source.next() if rank == 0 else None, src=0)
        loss = nn.functional.binary_cross_entropy_with_logits(model(piece[:, :30]), piece[:, 30:])
        optimizer.zero_grad()
        loss.backward()
        work = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for p, handle in zip(model.parameters(), work):
            handle.wait()
            p.grad.div_(world)
        optimizer.step()
        shown = loss.detach().clone()
        dist.reduce(shown, dst=0)
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {shown.item() / world:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
