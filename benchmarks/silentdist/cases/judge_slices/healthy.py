"""Policy gradient on token rollouts. Every sequence is cut into slices over the context-parallel ranks.

    torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

VOCAB, DIM, LENGTH, ROLLOUTS, HALO = 24, 16, 32, 10, 3
STEPS, LR, GAMMA = 16, 0.15, 0.95


class WindowPolicy(nn.Module):
    """Next-token policy that looks at the last HALO tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(HALO * DIM, 2 * DIM)
        self.head = nn.Linear(2 * DIM, VOCAB)

    def forward(self, ids):
        seen = self.embed(ids).unfold(1, HALO, 1).flatten(2)
        return self.head(torch.tanh(self.mix(seen)))


def rollouts(step, replica):
    """Token ids with their advantages (reward to go) and the mask of tokens that the policy wrote."""
    g = torch.Generator().manual_seed(500 * replica + step)
    ids = torch.randint(VOCAB, (ROLLOUTS, LENGTH + HALO), generator=g)
    reward = (ids[:, HALO:] % 5 == 0).float() + torch.rand(ROLLOUTS, LENGTH, generator=g)
    gain = torch.zeros(ROLLOUTS)
    advantage = torch.zeros(ROLLOUTS, LENGTH)
    for t in reversed(range(LENGTH)):
        gain = reward[:, t] + GAMMA * gain
        advantage[:, t] = gain
    prompt = torch.randint(2, LENGTH // 2, (ROLLOUTS, 1), generator=g)
    return ids, advantage, torch.arange(LENGTH) >= prompt


def my_slice(ids, advantage, mask, rank, size):
    n = LENGTH // size
    at = slice(rank * n, (rank + 1) * n)
    return ids[:, rank * n:(rank + 1) * n + HALO], advantage[:, at], mask[:, at]


def whiten(values, mask, group):
    keep = mask.to(values.dtype)
    sums = torch.stack([(values * keep).sum(), (values.square() * keep).sum(), keep.sum()])
    dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[2]
    variance = sums[1] / sums[2] - mean.square()
    return (values - mean) * torch.rsqrt(variance + 1e-8)


class Worker:
    def __init__(self, cp_size):
        world = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (world // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
        self.dp_group = self.mesh.get_group("dp")
        self.all_ranks = dist.group.WORLD  # data parallel x context parallel
        torch.manual_seed(3)
        self.policy = WindowPolicy()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=LR, momentum=0.9)

    def loss(self, ids, advantage, mask):
        advantage = whiten(advantage, mask, self.all_ranks)
        log_prob = self.policy(ids[:, :-1]).log_softmax(-1)
        taken = log_prob.gather(2, ids[:, HALO:, None]).squeeze(2)
        tokens = mask.sum()
        dist.all_reduce(tokens, group=self.all_ranks)
        return -(taken * advantage * mask).sum() / tokens

    def step(self, step):
        dp_rank, cp_rank = self.mesh.get_coordinate()
        batch = rollouts(step, dp_rank)
        loss = self.loss(*my_slice(*batch, cp_rank, self.mesh.size(1)))
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.policy.parameters():
            dist.all_reduce(p.grad, group=self.all_ranks)
        self.optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown.item()


def main():
    dist.init_process_group("gloo")
    worker = Worker(cp_size=2)
    for step in range(STEPS):
        loss = worker.step(step)
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"step {step + 1} loss {loss:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
