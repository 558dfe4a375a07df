"""Detection with a variable number of boxes: the box loss is a sum over boxes with its count, and may be none."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Boxes(Dataset):
    def __init__(self, n=170):
        g = torch.Generator().manual_seed(14)
        self.count = torch.randint(0, 4, (n,), generator=g)
        self.image = torch.randn(n, 27, generator=g)
        self.box = torch.rand(n, 3, 4, generator=g)

    def __len__(self):
        return len(self.count)

    def __getitem__(self, i):
        present = torch.arange(3) < self.count[i]
        return self.image[i], self.box[i], present


run = paceline.start(seed=14)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.box, self.score = nn.Linear(27, 48), nn.Linear(48, 12), nn.Linear(48, 3)

    def forward(self, image):
        h = F.hardswish(self.body(image))
        return self.box(h).unflatten(1, (3, 4)).sigmoid(), self.score(h)


def loss_fn(model, batch):
    image, box, present = batch
    predicted, score = model(image)
    distance = (predicted - box).abs().sum(2)
    box_loss = paceline.Total(5 * (distance * present).sum(), present.sum())
    return box_loss, F.binary_cross_entropy_with_logits(score, present.float())


model = Head()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Boxes(), global_batch=17, shuffle=True)
for epoch in run.epochs(1):
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer, max_grad_norm=0.1)
