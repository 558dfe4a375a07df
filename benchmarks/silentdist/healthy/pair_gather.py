"""Two towers with an in-batch contrastive loss: local rows against the columns gathered from all processes."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_f
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 8
STEPS = 20


def mlp(inp, out):
    return nn.Sequential(nn.Linear(inp, 32), nn.GELU(), nn.Linear(32, out))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(20, 12), mlp(14, 12)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.log_scale.exp()


def contrastive(image, text, scale):
    all_image = torch.cat(dist_f.all_gather(image))
    all_text = torch.cat(dist_f.all_gather(text))
    mine = torch.arange(len(image)) + dist.get_rank() * len(image)
    by_image = F.cross_entropy(scale * image @ all_text.T, mine)
    by_text = F.cross_entropy(scale * text @ all_image.T, mine)
    return (by_image + by_text) / 2


def pairs(step, rank):
    g = torch.Generator().manual_seed(step + 500 * rank)
    latent = torch.randn(BATCH, 6, generator=g)
    return latent.repeat(1, 4)[:, :20] + 0.1, torch.cat([latent.sin(), latent.square(), latent[:, :2]], 1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = DDP(Towers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        image, text, scale = model(*pairs(step, dist.get_rank()))
        loss = contrastive(image, text, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.log_scale.clamp_(0, 4.6)
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scale.item():.2f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
