"""(c) A DCGAN-style pair: two models, two optimizers, two backward calls of the discriminator in each batch, `detach`.

Noise drawn in the loop differs between shards, by design. Here it is part of the examples: the plain job has it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from .common import Case, Result, make_optimizer, norm, result_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    import paceline

N, BATCH, EPOCHS = 29, 8, 8  # 4 steps an epoch, the last of 5 examples
MICRO = 2
VARIANTS = ("",)
Batch = dict[str, Tensor]


class Pictures(Dataset[dict[str, Any]]):
    """Smooth 8 x 8 pictures, each with its noise."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        coarse = torch.randn(N, 1, 3, 3, generator=g, dtype=torch.float64)
        self.real = F.interpolate(coarse, size=8, mode="bilinear").tanh()
        self.noise = torch.randn(N, 4, generator=g, dtype=torch.float64)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"real": self.real[i], "noise": self.noise[i], "index": i}


def build(case: Case, seed: int) -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator; no bias before batch norm."""
    torch.manual_seed(seed)
    generator = nn.Sequential(
        nn.Linear(4, 8 * 4, bias=False),
        nn.Unflatten(1, (8, 2, 2)),
        norm(case, 8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, bias=False),
        norm(case, 6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 6, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(6, 8, 4, stride=2, padding=1, bias=False),
        norm(case, 8),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32, 1),
    )
    return generator, discriminator


def judge(discriminator: nn.Module, pictures: Tensor, real: bool) -> Tensor:
    """How far the discriminator is from saying `real` of the pictures: a mean over them."""
    logits = discriminator(pictures)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def real_loss(models: tuple[nn.Module, nn.Module], batch: Batch) -> Tensor:
    return judge(models[1], batch["real"], real=True)


def fake_loss(models: tuple[nn.Module, nn.Module], batch: Batch) -> Tensor:
    return judge(models[1], models[0](batch["noise"]).detach(), real=False)


def fool_loss(models: tuple[nn.Module, nn.Module], batch: Batch) -> Tensor:
    return judge(models[1], models[0](batch["noise"]), real=True)


def paceline_job(run: paceline.Run, case: Case) -> Result:
    record = Record()
    loader = run.loader(Pictures(), global_batch=BATCH, micro_batch=case.micro_batch, shuffle=True)
    generator, discriminator = run.prepare(*build(case, case.seed + run.world.rank))
    opt_g = run.prepare(make_optimizer(case, generator.parameters()))
    opt_d = run.prepare(make_optimizer(case, discriminator.parameters()))

    for epoch in run.epochs(EPOCHS):
        for batch in loader:
            if case.form == "closure":
                models = (generator, discriminator)
                loss_real = run.forward_backward(real_loss, models, batch, optimizer=opt_d)
                run.forward_backward(fake_loss, models, batch, optimizer=opt_d)
                run.step(opt_d)
                loss_fool = run.forward_backward(fool_loss, models, batch, optimizer=opt_g)
            else:
                fake = generator(batch["noise"])
                loss_real = judge(discriminator, batch["real"], real=True)
                run.backward(loss_real, optimizer=opt_d)
                run.backward(judge(discriminator, fake.detach(), real=False), optimizer=opt_d)
                run.step(opt_d)
                loss_fool = judge(discriminator, fake, real=True)
                run.backward(loss_fool, optimizer=opt_g)
            record.note(loader, batch, losses={"real": loss_real, "fool": loss_fool})
            if run.step(opt_g):
                record.close_step(epoch)

    generator.eval(), discriminator.eval()
    taken_for_real = {"real": 0, "fake": 0}
    with torch.no_grad():
        for batch in run.loader(Pictures(), global_batch=6, train=False):
            taken_for_real["real"] += int((discriminator(batch["real"]) > 0).sum())
            taken_for_real["fake"] += int((discriminator(generator(batch["noise"])) > 0).sum())
    metrics = {name: int(count) for name, count in run.sum(taken_for_real).items()}
    return result_of(generator, discriminator, metrics=metrics, record=record)


def plain_job(case: Case, steps: list[Step]) -> Result:
    data = Pictures()
    generator, discriminator = build(case, case.seed)
    opt_g = make_optimizer(case, generator.parameters())
    opt_d = make_optimizer(case, discriminator.parameters())
    losses = []

    for epoch in legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=case.micro_batch):
        for step in epoch:
            losses.append({"real": 0.0, "fool": 0.0})
            parts = step.parts(case.micro_batch)
            opt_d.zero_grad()
            opt_g.zero_grad()
            for part in parts:
                real, noise, share = data.real[part.ids], data.noise[part.ids], len(part) / len(step.batch)
                fake = generator(noise)
                loss_real = judge(discriminator, real, real=True) * share
                loss_real.backward()
                (judge(discriminator, fake.detach(), real=False) * share).backward()
                if part is parts[-1]:
                    opt_d.step()
                if case.form == "closure":  # fool_loss makes its pictures anew, and batch norm counts them
                    fake = generator(noise)
                loss_fool = judge(discriminator, fake, real=True) * share
                loss_fool.backward(inputs=list(generator.parameters()))
                losses[-1]["real"] += loss_real.item()
                losses[-1]["fool"] += loss_fool.item()
            opt_g.step()

    generator.eval(), discriminator.eval()
    with torch.no_grad():
        metrics = {
            "real": int((discriminator(data.real) > 0).sum()),
            "fake": int((discriminator(generator(data.noise)) > 0).sum()),
        }
    return result_of(generator, discriminator, metrics=metrics, losses=losses)
