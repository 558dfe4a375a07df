"""A WGAN with clipped weights on every process; the noise belongs to the examples; five critic steps for one."""

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline


class Real(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        angle = torch.rand((), generator=g) * 6.28
        return torch.stack([angle.cos(), angle.sin()]), torch.randn(4)


run = paceline.start(seed=6)
generator = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2))
critic = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))
opt_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
generator, critic, opt_g, opt_c = run.prepare(generator, critic, opt_g, opt_c)
loader = run.loader(Real(), global_batch=32, shuffle=True)
turn = 0
for epoch in run.epochs(2):
    for real, z in loader:
        turn += 1
        run.backward(critic(generator(z).detach()).mean() - critic(real).mean(), optimizer=opt_c)
        run.step(opt_c)
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        if turn % 5 == 0:
            run.backward(-critic(generator(z)).mean(), optimizer=opt_g)
            run.step(opt_g)
