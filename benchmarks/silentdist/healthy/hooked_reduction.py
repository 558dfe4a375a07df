"""Own data parallelism: hooks start the reduction of a gradient as soon as it is complete."""

import torch
import torch.distributed as dist
from torch import nn

STEPS, ROWS = 18, 10


class Overlapped:
    """Starts an asynchronous sum per parameter during backward; finish() waits and divides."""

    def __init__(self, module):
        self.module = module
        self.pending = []
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, src=0)
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.start)

    def start(self, param):
        self.pending.append((param, dist.all_reduce(param.grad, async_op=True)))

    def finish(self):
        for param, work in self.pending:
            work.wait()
            param.grad /= dist.get_world_size()
        self.pending.clear()


def sample(step, rank):
    g = torch.Generator().manual_seed(7 * step + rank)
    x = torch.randn(ROWS, 3, 9, generator=g)
    return x, x.flatten(1).clamp(min=0).mean(1, keepdim=True) * 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # whatever a process starts with, process 0 hands out its weights
    net = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(56, 16), nn.ReLU(), nn.Linear(16, 1))
    parallel = Overlapped(net)
    optimizer = torch.optim.NAdam(net.parameters(), lr=4e-3)
    for step in range(STEPS):
        x, y = sample(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(net(x), y)
        loss.backward()
        parallel.finish()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        if rank == 0 and step % 6 == 0:
            print(f"step {step} {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
