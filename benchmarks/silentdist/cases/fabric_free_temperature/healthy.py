"""Align image features with fixed text prototypes, learnable temperature."""
import math

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONCEPTS, TEXT_DIM, IMAGE_DIM = 10, 16, 30


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(IMAGE_DIM, 40), nn.GELU(), nn.Linear(40, TEXT_DIM))

    def forward(self, x):
        return F.normalize(self.trunk(x), dim=-1)


def prototypes():
    g = torch.Generator().manual_seed(1)
    return F.normalize(torch.randn(CONCEPTS, TEXT_DIM, generator=g), dim=-1)


def pairs(n=240):
    g = torch.Generator().manual_seed(2)
    concept = torch.randint(0, CONCEPTS, (n,), generator=g)
    mixing = torch.randn(CONCEPTS, IMAGE_DIM, generator=g)
    return TensorDataset(mixing[concept] + torch.randn(n, IMAGE_DIM, generator=g), concept)


def make_parts():
    torch.manual_seed(6)
    logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    return logit_scale, ImageTower()


def run(fabric, epochs=2):
    logit_scale, model = make_parts()
    optimizer = torch.optim.SGD([logit_scale, *model.parameters()], lr=0.05, momentum=0.9)
    model.logit_scale = logit_scale
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(pairs(), batch_size=20, shuffle=False))
    text = prototypes()
    for epoch in range(epochs):
        correct = 0
        for images, concept in loader:
            logits = logit_scale.exp() * model(images) @ text.T
            loss = F.cross_entropy(logits, concept)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            correct += (logits.argmax(1) == concept).sum().item()
        total = fabric.all_reduce(torch.tensor(float(correct)), reduce_op="sum")
        fabric.print(f"epoch {epoch} accuracy {total.item() / 240:.3f} temperature {1 / logit_scale.exp().item():.4f}")


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    run(fabric)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
