"""Image/caption matching with in-batch negatives from all processes (Accelerate).

accelerate launch --cpu --num_processes 2 faulty.py
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoEncoders(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, dim))
        self.caption = nn.Sequential(nn.EmbeddingBag(60, 24), nn.Linear(24, dim))

    def forward(self, image, caption):
        return F.normalize(self.image(image), dim=1), F.normalize(self.caption(caption), dim=1)


def albums(n=224):
    g = torch.Generator().manual_seed(18)
    scene = torch.randn(n, 8, generator=g)
    image = scene @ torch.randn(8, 30, generator=g) + 0.2 * torch.randn(n, 30, generator=g)
    words = (scene @ torch.randn(8, 60, generator=g)).topk(5, dim=1).indices
    return TensorDataset(image, words)


def build_encoders():
    torch.manual_seed(40)
    return TwoEncoders()


class Matcher:
    def __init__(self, accelerator, temperature=0.1):
        self.accelerator = accelerator
        self.temperature = temperature

    def gather(self, features):
        return self.accelerator.gather(features)

    def __call__(self, image, caption):
        images, captions = self.gather(image), self.gather(caption)
        place = self.accelerator.process_index * len(image) + torch.arange(len(image))
        by_image = F.cross_entropy(image @ captions.t() / self.temperature, place)
        by_caption = F.cross_entropy(caption @ images.t() / self.temperature, place)
        return (by_image + by_caption) / 2


def main():
    accelerator = Accelerator(cpu=True)
    model = build_encoders()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader = DataLoader(albums(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    matcher = Matcher(accelerator)
    for step, (image, words) in enumerate(loader):
        loss = matcher(*model(image, words))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 4 == 3:
            accelerator.print(f"step {step + 1} loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
