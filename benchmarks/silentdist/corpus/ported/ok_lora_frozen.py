"""LoRA: the base is frozen, only small matrices learn; the base's pretrained weights are read by all processes."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class LoRA(nn.Module):
    def __init__(self, base, rank=2, alpha=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


run = paceline.start(seed=9)
model = nn.Sequential(
    LoRA(nn.Linear(16, 32)), nn.LayerNorm(32).requires_grad_(False), nn.GELU(), LoRA(nn.Linear(32, 4))
)
optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
model, optimizer = run.prepare(model, optimizer)
g = torch.Generator().manual_seed(9)
with torch.no_grad():
    model[0].base.weight.copy_(torch.randn(32, 16, generator=g) / 4)
x = torch.randn(240, 16, generator=g)
loader = run.loader(TensorDataset(x, x[:, 3:7].argmax(1)), global_batch=30, shuffle=True)
for epoch in run.epochs(2):
    for a, b in loader:
        run.backward(F.cross_entropy(model(a), b, label_smoothing=0.1))
        run.step(optimizer)
    if run.main:
        adapters = {k: v for k, v in model.state_dict().items() if k.endswith((".a", ".b"))}
        torch.save(adapters, Path(tempfile.mkdtemp()) / "adapters.pt")
