import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS_OF_NOISE = 50


class TinyUNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Embedding(STEPS_OF_NOISE, width)
        self.down = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1)

    def forward(self, noisy, t):
        h = torch.nn.functional.silu(self.down(noisy) + self.time(t)[:, :, None, None])
        return self.up(h + torch.nn.functional.silu(self.mid(h)))


def stripes(n=224):
    g = torch.Generator().manual_seed(71)
    phase = torch.rand(n, 1, 1, 1, generator=g) * 6.28
    grid = torch.arange(8.0).view(1, 1, 1, 8).expand(1, 1, 8, 8)
    images = torch.sin(grid + phase)
    noise = torch.randn(n, 1, 8, 8, generator=g)
    t = torch.randint(0, STEPS_OF_NOISE, (n,), generator=g)
    return TensorDataset(images, noise, t)


def corrupt(images, noise, t):
    keep = torch.cos(1.57 * (t + 1) / STEPS_OF_NOISE)[:, None, None, None]
    return keep * images + (1 - keep ** 2).clamp(min=0).sqrt() * noise


def make_unet():
    torch.manual_seed(29)
    return TinyUNet()


def train(accelerator, batch_size=8):
    unet = make_unet()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3)
    loader = DataLoader(stripes(), batch_size=batch_size, shuffle=False)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    unet.train()
    net = accelerator.unwrap_model(unet)
    for step, (images, noise, t) in enumerate(loader):
        with accelerator.accumulate(unet):
            predicted = unet(corrupt(images, noise, t), t)
            loss = nn.functional.mse_loss(predicted, noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if step % 4 == 3:
            avg = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"{step + 1:3d} mse {avg.item():.4f}")


if __name__ == "__main__":
    acc = Accelerator(cpu=True)
    train(acc)
    acc.wait_for_everyone()
    acc.end_training()
