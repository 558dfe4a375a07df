"""Jobs in the idiom of pytorch/examples, small: each is a plain script for one device, and the same under Paceline.

What a job draws in its loop belongs to the examples here: noise differs over shards by design, and plain PyTorch has no
shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

N, BATCH, EPOCHS = 22, 6, 2  # the last global batch has 4 examples
State = dict[str, Tensor]


class Rows(Dataset[dict[str, Any]]):
    """Examples that are dicts of a row of each of these tensors."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: column[i] for name, column in self.columns.items()}

    def batches(self) -> list[dict[str, Tensor]]:
        return [
            {name: column[start : start + BATCH] for name, column in self.columns.items()}
            for start in range(0, N, BATCH)
        ]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def state_of(*models: nn.Module) -> State:
    return {f"{i}.{name}": t.detach().clone() for i, m in enumerate(models) for name, t in m.state_dict().items()}


def distance(one: State, other: State) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


# --- dcgan: two optimizers, a fake batch that two losses share, pictures of fixed noise while training


def gan_models() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net_g = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh())
    net_d = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid(), nn.Flatten(0))
    net_g, net_d = net_g.double(), net_d.double()
    made = [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for net in (net_d, net_g)]
    return net_g, net_d, made[0], made[1]


def pictures() -> Rows:
    return Rows(real=drawn(N, 5, seed=3).tanh(), noise=drawn(N, 3, seed=4))


FIXED = drawn(5, 3, seed=9)
EVERY = 2


def plain_gan(watch: bool = True) -> State:
    net_g, net_d, opt_d, opt_g = gan_models()
    criterion = nn.BCELoss()
    for _ in range(EPOCHS):
        for i, batch in enumerate(pictures().batches()):
            net_d.zero_grad()
            label = torch.ones(len(batch["real"]), dtype=torch.double)
            criterion(net_d(batch["real"]), label).backward()
            fake = net_g(batch["noise"])
            label.fill_(0)
            criterion(net_d(fake.detach()), label).backward()
            opt_d.step()
            net_g.zero_grad()
            label.fill_(1)
            criterion(net_d(fake), label).backward()
            opt_g.step()
            if watch and i % EVERY == 0:
                net_g(FIXED)
    return state_of(net_g, net_d)


def gan(run: paceline.Run) -> State:
    net_g, net_d, opt_d, opt_g = gan_models()
    run.prepare(net_g, net_d, opt_d, opt_g)
    criterion = nn.BCELoss()
    loader = run.loader(pictures(), global_batch=BATCH)
    for _ in run.epochs(EPOCHS):
        for i, batch in enumerate(loader):
            net_d.zero_grad()
            label = torch.ones(len(batch["real"]), dtype=torch.double)
            run.backward(criterion(net_d(batch["real"]), label))
            fake = net_g(batch["noise"])
            label.fill_(0)
            run.backward(criterion(net_d(fake.detach()), label))
            run.step(opt_d)
            net_g.zero_grad()
            label.fill_(1)
            run.backward(criterion(net_d(fake), label))
            run.step(opt_g)
            if i % EVERY == 0:
                net_g(FIXED)
    return state_of(net_g, net_d)


def gan_in_closures(run: paceline.Run) -> State:
    """The fake batch goes from one closure to the next in the batch itself."""

    def judge_both(models: tuple[nn.Module, nn.Module], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        net_g, net_d = models
        batch["fake"] = net_g(batch["noise"])
        real, fake = net_d(batch["real"]), net_d(batch["fake"].detach())
        return F.binary_cross_entropy(real, real * 0 + 1), F.binary_cross_entropy(fake, fake * 0)

    def fool(models: tuple[nn.Module, nn.Module], batch: dict[str, Tensor]) -> Tensor:
        judged = models[1](batch["fake"])
        return F.binary_cross_entropy(judged, judged * 0 + 1)

    net_g, net_d, opt_d, opt_g = gan_models()
    run.prepare(net_g, net_d, opt_d, opt_g)
    for _ in run.epochs(EPOCHS):
        for batch in run.loader(pictures(), global_batch=BATCH, name=f"epoch {_}"):
            run.forward_backward(judge_both, (net_g, net_d), batch, optimizer=opt_d)
            run.step(opt_d)
            run.forward_backward(fool, (net_g, net_d), batch, optimizer=opt_g)
            run.step(opt_g)
    return state_of(net_g, net_d)


# --- stylegan2: the R1 penalty of the discriminator every second time, with a step of its own (Karras et al. 2020)


def smooth_models() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net_g = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 5)).double()
    net_d = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 1)).double()  # the last bias feels no penalty
    made = [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.0, 0.99)) for net in (net_d, net_g)]
    return net_g, net_d, made[0], made[1]


def d_loss(net_d: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-net_d(real)).mean() + F.softplus(net_d(fake)).mean()


def r1_penalty(net_d: nn.Module, real: Tensor) -> Tensor:
    image = real.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(net_d(image).sum(), image, create_graph=True)
    return grad.square().sum(1).mean()


def plain_stylegan() -> State:
    net_g, net_d, opt_d, opt_g = smooth_models()
    for _ in range(EPOCHS):
        for i, batch in enumerate(pictures().batches()):
            opt_d.zero_grad()
            d_loss(net_d, batch["real"], net_g(batch["noise"]).detach()).backward()
            opt_d.step()
            if i % EVERY == 1:
                opt_d.zero_grad()
                (5 * r1_penalty(net_d, batch["real"])).backward()
                opt_d.step()
            opt_g.zero_grad()
            F.softplus(-net_d(net_g(batch["noise"]))).mean().backward()
            opt_g.step()
    return state_of(net_g, net_d)


def stylegan(run: paceline.Run) -> State:
    net_g, net_d, opt_d, opt_g = smooth_models()
    run.prepare(net_g, net_d, opt_d, opt_g)
    loader = run.loader(pictures(), global_batch=BATCH)
    for _ in run.epochs(EPOCHS):
        for i, batch in enumerate(loader):
            run.backward(d_loss(net_d, batch["real"], net_g(batch["noise"]).detach()), optimizer=opt_d)
            run.step(opt_d)
            if i % EVERY == 1:
                run.backward(5 * r1_penalty(net_d, batch["real"]), optimizer=opt_d)
                run.step(opt_d)
            run.backward(F.softplus(-net_d(net_g(batch["noise"]))).mean(), optimizer=opt_g)
            run.step(opt_g)
    return state_of(net_g, net_d)


Job = Callable[[paceline.Run], State]


def compare(job: Job, expected: Callable[[], State], tolerance: float, **settings: Any) -> None:
    run = paceline.start(device="cpu", progress="off", **settings)
    try:
        found = distance(job(run), expected())
    finally:
        run.close()
    assert found <= tolerance, f"{job.__name__}: {found:.1e}"
