"""data_parallel_before.py with Paceline.

paceline run --strategy data_parallel examples/migrate/data_parallel_after.py
paceline run --strategy data_parallel:devices=cpu,cpu examples/migrate/data_parallel_after.py
"""

import torch
from job import digits, network, options
from torch import Tensor, nn
from torch.nn import functional as F

import paceline


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)  # on each device, of its own shard


def main() -> None:
    args = options(batch=60)  # of all GPUs together
    run = paceline.start(seed=0)
    train_set, test_set = digits()
    train_loader = run.loader(train_set, global_batch=args.batch, shuffle=True)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)

    for epoch in run.epochs(args.epochs):
        for batch in train_loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
        with torch.no_grad():
            images, labels = test_set.tensors
            right = model(images.to(run.device)).argmax(1) == labels.to(run.device)
        run.print(f"epoch {epoch + 1} test accuracy {right.double().mean():.4f}")
    run.export(args.out)


if __name__ == "__main__":
    main()
