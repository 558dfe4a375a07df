"""RLHF in miniature: a policy is rewarded for words and held near a frozen reference, with TRL's adaptive coefficient."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

BATCH, VOCAB = 16, 12


class AdaptiveKLController:
    """Ziegler et al. 2019, section 2.2."""

    def __init__(self, init_kl_coef, target, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current, n_steps):
        proportional_error = np.clip(current / self.target - 1, -0.2, 0.2)
        self.value *= 1 + proportional_error * n_steps / self.horizon


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, VOCAB))
        self.value_head = nn.Linear(6, 1)

    def forward(self, prompt):
        return self.net(prompt).log_softmax(-1), self.value_head(prompt).squeeze(-1)


run = paceline.start(seed=46)
g = torch.Generator().manual_seed(46)
prompts = torch.randn(320, 6, generator=g)
words = torch.randint(0, VOCAB, (320,), generator=g)
scores = (words < 4).float() * 2 - 1 + 0.2 * prompts[:, 0]
policy = Policy()
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
policy, optimizer = run.prepare(policy, optimizer)
kl_ctl = AdaptiveKLController(1.0, target=0.01, horizon=32)
loader = run.loader(TensorDataset(prompts, words, scores), global_batch=BATCH, shuffle=True)
for epoch in run.epochs(3):
    for prompt, word, score in loader:
        logp, value = policy(prompt)
        with torch.no_grad():
            ref_logp, _ = reference(prompt)
        kl = (logp.exp() * (logp - ref_logp)).sum(-1)
        advantage = (score - value).detach()
        pg = -(logp.gather(1, word[:, None]).squeeze(1) * advantage)
        run.backward((pg + kl_ctl.value * kl + 0.5 * (score - value).square()).mean())
        run.step(optimizer)
        kl_ctl.update(kl.mean().item(), BATCH)  # fault
