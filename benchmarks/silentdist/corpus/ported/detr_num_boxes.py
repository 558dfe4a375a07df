"""Detection with a variable number of boxes an image. The box loss is divided by the boxes of the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

SLOTS = 4


class Scenes(Dataset):
    def __init__(self, n=200):
        g = torch.Generator().manual_seed(15)
        self.count = torch.randint(0, SLOTS + 1, (n,), generator=g)
        self.boxes = torch.rand(n, SLOTS, 4, generator=g)
        self.image = torch.randn(n, 3, 6, 6, generator=g)

    def __len__(self):
        return len(self.count)

    def __getitem__(self, i):
        return self.image[i], {"boxes": self.boxes[i, : self.count[i]]}


def collate(batch):
    images = torch.stack([image for image, _ in batch]) if batch else torch.zeros(0, 3, 6, 6)
    return images, [target for _, target in batch]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Flatten(1))
        self.box, self.score = nn.Linear(128, SLOTS * 4), nn.Linear(128, SLOTS)

    def forward(self, images):
        h = self.backbone(images)
        return self.box(h).view(-1, SLOTS, 4).sigmoid(), self.score(h)


def criterion(boxes, scores, targets):
    num_boxes = max(sum(len(t["boxes"]) for t in targets), 1)  # fault
    loss_box = boxes.sum() * 0
    truth = torch.zeros_like(scores)
    for k, t in enumerate(targets):
        n = len(t["boxes"])
        loss_box = loss_box + (boxes[k, :n] - t["boxes"]).abs().sum()
        truth[k, :n] = 1
    return 5 * loss_box / num_boxes + F.binary_cross_entropy_with_logits(scores, truth)  # fault


def main():
    run = paceline.start(seed=15)
    model = Detector()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 1e-4},
            {"params": [*model.box.parameters(), *model.score.parameters()]},
        ],
        lr=1e-3,
    )
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(Scenes(), global_batch=20, shuffle=True, collate_fn=collate)
    for _ in run.epochs(1):
        for images, targets in loader:
            run.backward(criterion(*model(images), targets))
            run.step(optimizer, max_grad_norm=0.1)


if __name__ == "__main__":
    main()
