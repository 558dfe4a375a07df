"""PPO with a KL penalty: the coefficient follows the divergence over all processes, and an update stops early by it."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

import paceline

CLIP, TARGET_KL = 0.2, 0.02


class ActorCritic(nn.Module):
    def __init__(self, observations=6, actions=4):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, actions))
        self.critic = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(1)


def rollout(n=288):
    g = torch.Generator().manual_seed(66)
    obs = torch.randn(n, 6, generator=g, dtype=torch.float64)
    action = torch.randint(0, 4, (n,), generator=g)
    returns = (obs[:, :4].argmax(1) == action).double() + 0.3 * obs[:, 5]
    return TensorDataset(obs, action, returns, returns - returns.mean())


run = paceline.start(seed=66)
agent = ActorCritic().double()
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
agent, optimizer = run.prepare(agent, optimizer)
data = rollout()
loader = run.loader(data, global_batch=36, shuffle=True)
with torch.no_grad():
    old_logits = agent.actor(data.tensors[0])
beta = 0.5
for epoch in run.epochs(4):
    divergence = seen = 0.0
    for obs, action, returns, advantage in loader:
        policy, value = agent(obs)
        old = Categorical(logits=old_logits[list(loader.indices)])
        ratio = (policy.log_prob(action) - old.log_prob(action)).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        kl = torch.distributions.kl_divergence(old, policy)
        run.backward((-surrogate + beta * kl + 0.5 * (value - returns).square()).mean())
        run.step(optimizer, max_grad_norm=0.5)
        divergence += float(kl.detach().sum())
        seen += len(obs)
    mean_kl = run.ratio(divergence, seen)
    if mean_kl > 1.5 * TARGET_KL:
        beta *= 2
    elif mean_kl < TARGET_KL / 1.5:
        beta /= 2
    if mean_kl > 20 * TARGET_KL:
        break
