"""lightning_before.py with Paceline. paceline run --nproc 2 examples/migrate/lightning_after.py"""

from typing import Any

import torch
from job import digits, network, options
from torch import Tensor, nn
from torch.nn import functional as F

import paceline


def training_step(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def accuracy(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.argmax(1) == batch[1]  # one for each example: their mean is exact


def main() -> None:
    args = options(batch=60)  # of all processes together
    train_set, test_set = digits()
    run = paceline.start(seed=0)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    history = paceline.fit(
        model, training_step, train_set, optimizer=optimizer, scheduler=paceline.PerEpoch(schedule),
        global_batch=args.batch, epochs=args.epochs, max_grad_norm=1.0,
        evaluate_on=test_set, metrics={"accuracy": accuracy}, run=run,
        shuffle=True,
    )  # fmt: skip
    run.print(f"test accuracy {history['val_accuracy'][-1]:.4f}")
    run.export(args.out)


if __name__ == "__main__":
    main()
