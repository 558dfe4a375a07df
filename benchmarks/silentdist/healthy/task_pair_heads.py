"""Two tasks on one trunk; in a step one process may work on sentiment while another works on topic."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ROWS, WORDS = 24, 8, 50


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.EmbeddingBag(WORDS, 24), nn.Linear(24, 24), nn.GELU())
        self.heads = nn.ModuleDict({"sentiment": nn.Linear(24, 2), "topic": nn.Linear(24, 5)})

    def forward(self, ids, task):
        return self.heads[task](self.trunk(ids))


def schedule(step, rank):
    return ("sentiment", "topic")[(step + rank // (1 + step % 3)) % 2]


def fetch(step, rank):
    g = torch.Generator().manual_seed(97 * step + rank)
    ids = torch.randint(0, WORDS, (ROWS, 12), generator=g)
    task = schedule(step, rank)
    label = (ids.sum(1) // 40) % 2 if task == "sentiment" else ids.max(1).values % 5
    return task, ids, label


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    model = DDP(TwoTasks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        task, ids, label = fetch(step, rank)
        loss = nn.functional.cross_entropy(model(ids, task), label)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"rank {rank} step {step} {task} {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
