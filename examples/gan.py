"""DCGAN (Radford et al. 2016): a generator and a discriminator, each with an optimizer, trained alternately.

    python examples/gan.py                                        # the 8 x 8 digits that come with scikit-learn
    paceline run --nproc 2 examples/gan.py --sheet samples.png
    paceline run --nproc 8 examples/gan.py --data cifar-10-python.tar.gz --width 64 --epochs 100    # on GPUs

Each backward names its optimizer, and only changes that optimizer's gradients. With noise="example" the generator's
noise is keyed by the images of the batch, so it is the same on any number of processes. There is no --micro-batch: the
generator's update would depend on how much of the batch the discriminator has already used.

The script prints the Frechet distance between generated and test images, as normal distributions of at most 8 x 8
pixels: FID's formula (Heusel et al. 2017) without its network. The training images show the best possible value.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from cifar10_data import DataError, load
from digits import digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

LATENT = 64


def images(data: Path | None) -> tuple[Tensor, ...]:
    """Training and test images (n, channels, side, side) from -1 to 1. Raises DataError for other files."""
    if data is None:
        return tuple(2 * part.tensors[0] - 1 for part in digits(None))
    return tuple(part.images.permute(0, 3, 1, 2) / 127.5 - 1 for part in load(data))


def networks(channels: int, side: int, width: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Generator: (n, LATENT) -> images. Discriminator: images -> (n, 1). Both have a layer per doubling from 4 x 4."""
    wide, generator, discriminator = width, list[nn.Module](), list[nn.Module]()
    while side > 4:  # build the generator from its end, the discriminator from its beginning
        side, inner = side // 2, wide // 2 if generator else channels
        after = [nn.BatchNorm2d(inner), nn.ReLU()] if generator else [nn.Tanh()]
        generator[:0] = [nn.ConvTranspose2d(wide, inner, 4, 2, 1, bias=not generator), *after]
        norm = [nn.BatchNorm2d(wide)] if discriminator else []
        discriminator += [nn.Conv2d(inner, wide, 4, 2, 1, bias=not norm), *norm, nn.LeakyReLU(0.2)]
        wide *= 2
    wide //= 2
    start = [nn.Linear(LATENT, wide * 16, bias=False), nn.Unflatten(1, (wide, 4, 4)), nn.BatchNorm2d(wide), nn.ReLU()]
    return nn.Sequential(*start, *generator), nn.Sequential(*discriminator, nn.Flatten(), nn.Linear(wide * 16, 1))


def frechet(one: Tensor, other: Tensor) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of the pixels of images (n, c, s, s), s at most 8."""
    one, other = (F.adaptive_avg_pool2d(x.double(), min(8, x.shape[-1])).flatten(1).T for x in (one, other))
    values, vectors = torch.linalg.eigh(torch.cov(one))
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ torch.cov(other) @ root).clamp(min=0).sqrt().sum()
    means = (one.mean(1) - other.mean(1)).square().sum()
    return float(means + torch.cov(one).trace() + torch.cov(other).trace() - 2 * cross)


def write_sheet(file: Path, pictures: Tensor) -> None:
    """Write an image with eight pictures per row, each enlarged to about 64 x 64."""
    from PIL import Image

    scaled = F.interpolate((pictures + 1) / 2, scale_factor=max(64 // pictures.shape[-1], 1))
    rows = [torch.cat([*row], dim=2) for row in F.pad(scaled, (2, 2, 2, 2), value=1.0).split(8)]
    sheet = (torch.cat(rows, dim=1).clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
    Image.fromarray(sheet.squeeze()).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns to draw images like those of a data set.")
    parser.add_argument("--data", type=Path, help="CIFAR-10, as an archive or a zip (default: scikit-learn's digits)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=50, help="images per step, over all processes")
    parser.add_argument("--width", type=int, default=32, help="channels of the layer at the image")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--every", type=int, default=10, help="evaluate every so many epochs")
    parser.add_argument("--sheet", type=Path, help="write an image of 64 samples to this file (needs Pillow)")
    options = parser.parse_args()
    try:
        train, test = images(options.data)
    except DataError as error:
        parser.error(str(error))

    run = paceline.start(seed=0, noise="example")
    loader = run.loader(TensorDataset(train), global_batch=options.global_batch, shuffle=True)
    generator, discriminator = networks(train.shape[1], train.shape[2], options.width)
    optimizers = (torch.optim.Adam(own.parameters(), options.lr, (0.5, 0.999)) for own in (generator, discriminator))
    generator, discriminator, opt_g, opt_d = run.prepare(generator, discriminator, *optimizers)
    latent = torch.randn(1000, LATENT, generator=torch.Generator().manual_seed(0)).to(run.device)

    @torch.no_grad()
    def samples() -> Tensor:
        generator.eval()
        drawn = generator(latent).cpu()
        generator.train()
        return drawn

    run.print(f"training images: distance {frechet(train, test):.3f}; epoch 0: distance {frechet(samples(), test):.3f}")
    for epoch in run.epochs(options.epochs):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT, device=run.device))
            run.backward(F.softplus(-discriminator(real)).mean(), optimizer=opt_d)
            run.backward(F.softplus(discriminator(fake.detach())).mean(), optimizer=opt_d)
            run.step(opt_d)
            run.backward(F.softplus(-discriminator(fake)).mean(), optimizer=opt_g)
            run.step(opt_g)
        if (epoch + 1) % options.every == 0 or epoch + 1 == options.epochs:
            run.print(f"epoch {epoch + 1}: distance {frechet(samples(), test):.3f}")
    if options.sheet and run.main:
        write_sheet(options.sheet, samples()[:64])


if __name__ == "__main__":
    main()
