"""CLIP-like training: all_gather, and the own features with their gradient put in the place of their copies."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(20, 12), nn.Linear(16, 12)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp()


def gather(x):
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def contrastive(image, text, scale):
    every_image, every_text = gather(image), gather(text)
    target = dist.get_rank() * len(image) + torch.arange(len(image))
    loss_image = F.cross_entropy(scale * image @ every_text.T, target)
    loss_text = F.cross_entropy(scale * text @ every_image.T, target)
    return (loss_image + loss_text) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    z = torch.randn(256, 8, generator=g)
    data = TensorDataset(z @ torch.randn(8, 20, generator=g), z @ torch.randn(8, 16, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = contrastive(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
