"""Mean teacher: the teacher is the moving average of the student, on every process, and part of the checkpoints."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Augmented(Dataset):
    def __init__(self, n=216):
        g = torch.Generator().manual_seed(5)
        self.y = torch.randint(0, 3, (n,), generator=g)
        self.x = F.one_hot(self.y, 10) + 0.8 * torch.randn(n, 10, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return x + 0.2 * torch.randn(10), x + 0.2 * torch.randn(10), self.y[i], i % 4 == 0


@torch.no_grad()
def follow(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(decay).add_(s, alpha=1 - decay)
    for t, s in zip(teacher.buffers(), student.buffers()):
        t.copy_(s)


run = paceline.start(seed=5)
student = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
teacher.eval()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
student, optimizer = run.prepare(student, optimizer)
teacher.load_state_dict(student.state_dict())
run.track(teacher=teacher)
loader = run.loader(Augmented(), global_batch=36, shuffle=True)
for epoch in run.epochs(2):
    for one, two, y, labelled in loader:
        with torch.no_grad():
            target = teacher(two).softmax(1)
        logits = student(one)
        losses = F.cross_entropy(logits, y, reduction="none")
        run.backward(total=(losses * labelled).sum(), count=labelled.sum(), retain_graph=True)
        run.backward((logits.softmax(1) - target).square().mean())
        run.step(optimizer)
        follow(teacher, student, min(0.99, 1 - 1 / (run.steps + 1)))
