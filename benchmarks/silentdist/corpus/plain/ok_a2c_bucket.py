"""A2C by hand on several processes: the weights are the same at the start, the environments are each process's own."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

UPDATES, ENVS, HORIZON, GAMMA = 12, 6, 8, 0.9


class Bandits:
    def __init__(self, n, seed):
        self.rng = np.random.default_rng(seed)
        self.n = n
        self.reset()

    def reset(self):
        self.goal = self.rng.integers(0, 3, self.n)

    def observe(self):
        noisy = np.eye(3)[self.goal] + 0.3 * self.rng.standard_normal((self.n, 3))
        return torch.as_tensor(noisy, dtype=torch.float32)

    def step(self, action):
        reward = (action == self.goal).astype(np.float32)
        self.reset()
        return torch.from_numpy(reward)


def sync_gradients(model, size):
    bucket = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(bucket)
    bucket /= size
    offset = 0
    for p in model.parameters():
        p.grad.copy_(bucket[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), dist.get_world_size()
    torch.manual_seed(32)
    body = nn.Sequential(nn.Linear(3, 24), nn.Tanh())
    agent = nn.ModuleDict({"body": body, "pi": nn.Linear(24, 3), "v": nn.Linear(24, 1)})
    for tensor in agent.state_dict().values():
        dist.broadcast(tensor, src=0)
    seed = 32 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = Bandits(ENVS, seed)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=3e-3, alpha=0.99, eps=1e-5)
    for update in range(UPDATES):
        log_probs, values, rewards, entropies = [], [], [], []
        for _ in range(HORIZON):
            h = agent["body"](envs.observe())
            policy = Categorical(logits=agent["pi"](h))
            action = policy.sample()
            log_probs.append(policy.log_prob(action))
            entropies.append(policy.entropy())
            values.append(agent["v"](h).squeeze(1))
            rewards.append(envs.step(action.numpy()))
        value, reward = torch.stack(values), torch.stack(rewards)
        advantage = (reward - value).detach()
        loss = -(torch.stack(log_probs) * advantage).mean() + 0.5 * (reward - value).square().mean()
        loss = loss - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(agent, size)
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        mean_reward = reward.mean()
        dist.all_reduce(mean_reward)
        if rank == 0 and update % 4 == 3:
            print(update, mean_reward.item() / size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
