"""REINFORCE on a contextual bandit; the advantages are normalised over the batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

ARMS = 4


def loss_fn(policy, batch):
    context, action, reward = batch
    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)  # fault
    log_prob = policy(context).log_softmax(1).gather(1, action[:, None]).squeeze(1)
    return -(log_prob * advantage).mean()


run = paceline.start(seed=16)
g = torch.Generator().manual_seed(16)
context = torch.randn(320, 6, generator=g)
action = torch.randint(0, ARMS, (320,), generator=g)
reward = (context[:, :ARMS].argmax(1) == action).float() + 0.1 * torch.randn(320, generator=g)
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, ARMS))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
policy, optimizer = run.prepare(policy, optimizer)
rollouts = run.loader(TensorDataset(context, action, reward), global_batch=40, shuffle=True)
for iteration in run.epochs(2):
    for batch in rollouts:
        run.forward_backward(loss_fn, policy, batch)
        run.step(optimizer)
