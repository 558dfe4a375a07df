"""Policy gradient; the advantages are normalised by the sums over all processes."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

run = paceline.start(seed=16)


def normalised(reward):
    moments = run.sum(torch.stack([torch.tensor(float(len(reward))), reward.sum(), reward.square().sum()]).double())
    n, first, second = moments.tolist()
    mean = first / n
    return (reward - mean) / max((second / n - mean**2) ** 0.5, 1e-6)


g = torch.Generator().manual_seed(16)
context = torch.randn(300, 6, generator=g)
action = torch.randint(0, 4, (300,), generator=g)
reward = (context[:, :4].argmax(1) == action).float()
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
value = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-3)
policy, value, optimizer = run.prepare(policy, value, optimizer)
for iteration in run.epochs(1):
    for c, a, r in run.loader(TensorDataset(context, action, reward), global_batch=30, shuffle=True):
        distribution = torch.distributions.Categorical(logits=policy(c))
        advantage = normalised(r - value(c).squeeze(1).detach())
        run.backward(-(distribution.log_prob(a) * advantage).mean() - 0.01 * distribution.entropy().mean())
        run.backward(0.5 * (value(c).squeeze(1) - r).square().mean())
        run.step(optimizer)
