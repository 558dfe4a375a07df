"""fit() with a callback that lowers the learning rate as the loss falls."""

import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class FollowLoss(paceline.Callback):
    def __init__(self, lr):
        self.lr = lr

    def on_step(self, fit):
        for group in fit.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, float(fit.loss))  # fault


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def main():
    iris = load_iris()
    x = torch.tensor(iris.data, dtype=torch.float32)
    data = TensorDataset((x - x.mean(0)) / x.std(0), torch.tensor(iris.target))
    run = paceline.start(seed=23, progress="off")
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    history = paceline.fit(
        model,
        loss_fn,
        data,
        run=run,
        optimizer=optimizer,
        global_batch=30,
        epochs=4,
        callbacks=[FollowLoss(0.3)],
    )
    run.print(history["loss"])


main()
