"""Sharpness-aware minimization (Foret et al. 2021) on wine: up to the worst neighbour, then down from there."""

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def worst_neighbour(model, loss, rho=0.1):
    """The weights a distance rho away, where the loss is largest to first order; gradients go to the model's own."""
    names, params = zip(*model.named_parameters())
    grads = torch.autograd.grad(loss, params)  # fault
    scale = rho / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
    return {name: p + (scale * g).detach() for name, p, g in zip(names, params, grads)}


def main():
    wine = load_wine()
    x = torch.tensor(wine.data, dtype=torch.float32)
    data = TensorDataset((x - x.mean(0)) / x.std(0), torch.tensor(wine.target))
    run = paceline.start(seed=56)
    model = nn.Sequential(nn.Linear(13, 32), nn.Mish(), nn.Linear(32, 3))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, base = run.prepare(model, base)
    loader = run.loader(data, global_batch=30, shuffle=True)
    for epoch in run.epochs(3):
        for features, labels in loader:
            neighbour = worst_neighbour(model, F.cross_entropy(model(features), labels))
            run.backward(F.cross_entropy(functional_call(model, neighbour, (features,)), labels))
            run.step(base)


main()
