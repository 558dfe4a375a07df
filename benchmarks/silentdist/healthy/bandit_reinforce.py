"""REINFORCE on a contextual bandit; the baseline is the mean reward over the episodes of all processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

EPISODES, ARMS, UPDATES = 12, 5, 20


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(6, 24)
        self.affine2 = nn.Linear(24, ARMS)

    def forward(self, state):
        return self.affine2(torch.relu(self.affine1(state)))


def play(policy, generator):
    state = torch.randn(EPISODES, 6, generator=generator)
    logits = policy(state)
    with torch.no_grad():
        action = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
        reward = (action == state[:, :ARMS].argmax(1)).float() + 0.1 * torch.randn(EPISODES, generator=generator)
    return Categorical(logits=logits).log_prob(action), reward


def global_mean(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(543)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    world_rng = torch.Generator().manual_seed(543 + 7 * rank)
    for update in range(UPDATES):
        log_prob, reward = play(policy, world_rng)
        mean = global_mean(reward)
        spread = global_mean((reward - mean).square()).sqrt()
        loss = (-log_prob * (reward - mean) / (spread + 1e-6)).mean()
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
        dist.all_reduce(flat)
        flat /= world
        offset = 0
        for p in policy.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        optimizer.step()
        if rank == 0 and update % 5 == 0:
            print(f"update {update} mean reward {mean.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
