"""Fine-tunes a convolutional net whose batch norms keep the statistics of pre-training."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8


def conv_block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(conv_block(1, 8), conv_block(8, 16))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    def forward(self, x):
        return self.head(self.backbone(x))

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self


def boxes(n):
    g = torch.Generator().manual_seed(40)
    x = 0.2 * torch.randn(n, 1, 8, 8, generator=g)
    low = torch.randint(0, 5, (n, 2), generator=g)
    for i, (r, c) in enumerate(low.tolist()):
        x[i, 0, r : r + 3, c : c + 3] += 1
    return x, torch.cat([low, low + 3], 1) / 8


def pretrained():
    torch.manual_seed(41)
    model = Detector()
    nn.Module.train(model)
    with torch.no_grad():
        for _ in range(10):
            model.backbone(0.3 + 0.5 * torch.randn(32, 1, 8, 8))
    return model


def main():
    dist.init_process_group("gloo")
    model = pretrained()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.requires_grad_(False)
    model = DDP(model, broadcast_buffers=False)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    data = TensorDataset(*boxes(112))
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, BATCH, sampler=sampler):
            loss = nn.functional.l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"[{dist.get_rank()}] epoch {epoch} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
