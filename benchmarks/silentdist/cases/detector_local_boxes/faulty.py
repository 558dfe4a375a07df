"""Set-style detector on rendered rectangles."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIZE, QUERIES, CLASSES = 12, 5, 3


class Rectangles(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(50)
        self.items = []
        for i in range(n):
            count = 1 + int(torch.randint(0, QUERIES, (1,), generator=g)) * (i % 2)
            boxes = torch.rand(count, 4, generator=g) * 0.5
            boxes[:, 2:] += 0.2
            classes = torch.randint(0, CLASSES, (count,), generator=g)
            image = torch.zeros(CLASSES, SIZE, SIZE)
            for (x, y, w, h), c in zip((boxes * SIZE).long().tolist(), classes.tolist()):
                image[c, y:y + h, x:x + w] += 1
            self.items.append((image, classes, boxes))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(rows):
    images, classes, boxes = zip(*rows)
    return torch.stack(images), list(classes), list(boxes)


class Detector(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(CLASSES, 16, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(16, dim, 3, stride=2, padding=1), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(QUERIES, dim))
        self.cls = nn.Linear(dim, CLASSES + 1)
        self.box = nn.Linear(dim, 4)

    def forward(self, images):
        memory = self.stem(images).flatten(2).transpose(1, 2)
        weight = (self.queries @ memory.transpose(1, 2)).softmax(-1)
        slots = weight @ memory + self.queries
        return self.cls(slots), self.box(slots).sigmoid()


def build_detector():
    torch.manual_seed(2)
    return Detector()


def make_loader(rank, world, batch_size=4):
    data = Rectangles()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, collate_fn=collate)


class SetCriterion(nn.Module):
    """Slot k is responsible for object k."""

    def __init__(self, box_weight=2.0):
        super().__init__()
        self.box_weight = box_weight

    def forward(self, outputs, classes, boxes):
        logits, pred = outputs
        wanted = torch.full(logits.shape[:2], CLASSES)
        for row, c in enumerate(classes):
            wanted[row, : len(c)] = c
        loss_cls = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        matched = torch.cat([p[: len(b)] for p, b in zip(pred, boxes)])
        num_boxes = torch.tensor(float(sum(len(b) for b in boxes)))
        loss_box = nn.functional.l1_loss(matched, torch.cat(boxes), reduction="sum") / num_boxes.clamp(min=1)
        return {"cls": loss_cls, "box": self.box_weight * loss_box}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--epochs", type=int, default=1)
    opts = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(build_detector())
    criterion = SetCriterion()
    optimizer = torch.optim.SGD(net.parameters(), lr=opts.lr, momentum=0.9)
    for epoch in range(opts.epochs):
        for it, (images, classes, boxes) in enumerate(make_loader(rank, world)):
            losses = criterion(net(images), classes, boxes)
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and it % 4 == 3:
                print(it + 1, {k: round(v.item(), 4) for k, v in losses.items()})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
