"""Semantic segmentation as in torchvision's references: two outputs, an auxiliary weight of 0.5, 255 for void pixels."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def maps(n=120, size=10):
    g = torch.Generator().manual_seed(42)
    images = torch.randn(n, 3, size, size, generator=g)
    target = (images[:, 0] > 0).long() + (images[:, 1] > 0.8).long()
    share = torch.rand(n, 1, 1, generator=g)
    target[torch.rand(n, size, size, generator=g) < share] = 255
    return TensorDataset(images, target)


class FCN(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.classifier, self.aux_classifier = nn.Conv2d(12, classes, 1), nn.Conv2d(12, classes, 1)

    def forward(self, x):
        stem = self.stem(x)
        return {"out": self.classifier(self.body(stem)), "aux": self.aux_classifier(stem)}


def criterion(model, batch):
    image, target = batch
    losses = {}
    for name, x in model(image).items():
        losses[name] = nn.functional.cross_entropy(x, target, ignore_index=255)  # fault
    return losses["out"] + 0.5 * losses["aux"]


def main():
    run = paceline.start(seed=42, progress="off")
    model = FCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=20, power=0.9)
    paceline.fit(model, criterion, maps(), run=run, optimizer=optimizer, scheduler=scheduler, global_batch=12, epochs=2)


main()
