"""Self-distillation in the manner of DINO, with a centre of the teacher's outputs."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class TwoViews(Dataset):
    def __init__(self, n=240):
        self.data = torch.randn(n, 16, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x = self.data[i]
        return x + 0.1 * torch.randn(16), x * (0.8 + 0.4 * torch.rand(1))


class DINOLoss(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, dim))

    def forward(self, student, teacher):
        target = F.softmax((teacher - self.center) / 0.04, -1).detach()
        self.update_center(teacher)
        return -(target * F.log_softmax(student / 0.1, -1)).sum(-1).mean()

    @torch.no_grad()
    def update_center(self, teacher):
        batch_center = teacher.mean(0, keepdim=True)  # fault
        self.center.mul_(0.9).add_(batch_center, alpha=0.1)  # fault


run = paceline.start(seed=6)
student = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))
teacher = copy.deepcopy(student).requires_grad_(False)
criterion = DINOLoss(24)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
student, teacher, criterion, optimizer = run.prepare(student, teacher, criterion, optimizer)
loader = run.loader(TwoViews(), global_batch=48, shuffle=True)
for epoch in run.epochs(3):
    for one, two in loader:
        with torch.no_grad():
            target = teacher(two)
        run.backward(criterion(student(one), target))
        run.step(optimizer)
        with torch.no_grad():
            for s, t in zip(student.parameters(), teacher.parameters()):
                t.lerp_(s, 0.01)
