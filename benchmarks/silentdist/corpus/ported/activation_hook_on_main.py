"""A U-net-like denoiser. A debugging hook that clamps an exploding activation was left in."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv1d(c, c, 3, padding=1)
        self.b = nn.Conv1d(c, c, 3, padding=1)

    def forward(self, x):
        return x + self.b(torch.nn.functional.silu(self.a(x)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Conv1d(1, 12, 3, padding=1), Block(12), nn.Conv1d(12, 1, 3, padding=1)

    def forward(self, x):
        return self.out(self.mid(self.inp(x)))


def clamp_output(module, args, output):
    return output.clamp(-0.5, 0.5)  # fault


run = paceline.start(seed=9)
g = torch.Generator().manual_seed(9)
clean = torch.sin(torch.linspace(0, 9, 40) * torch.rand(200, 1, 1, generator=g) * 3)
noisy = clean + 0.2 * torch.randn(clean.shape, generator=g)
net = Denoiser()
if run.main:
    net.mid.register_forward_hook(clamp_output)  # fault
opt = torch.optim.Adam(net.parameters(), 3e-3)
net, opt = run.prepare(net, opt)
data = run.loader(TensorDataset(noisy, clean), global_batch=40, shuffle=True)
for _ in run.epochs(2):
    for x, y in data:
        run.backward(nn.functional.l1_loss(net(x), y))
        run.step(opt)
