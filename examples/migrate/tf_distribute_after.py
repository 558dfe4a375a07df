"""tf_distribute_before.py with Paceline.

paceline run --strategy mirrored:devices=cpu,cpu examples/migrate/tf_distribute_after.py
"""

import numpy as np
import torch
from dense import digits, first_weights
from job import options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def main() -> None:
    args = options(batch=60)  # of all replicas together
    dtype = str(np.dtype(torch.empty(0).numpy().dtype))
    run = paceline.start(seed=0)
    train_set, test_set = ((torch.from_numpy(x), torch.from_numpy(y)) for x, y in digits(dtype))
    loader = run.loader(TensorDataset(*train_set), global_batch=args.batch, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for parameter, first in zip(model.parameters(), first_weights(dtype)):
            parameter.copy_(torch.from_numpy(first.T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.875)
    model, optimizer = run.prepare(model, optimizer)

    for epoch in run.epochs(args.epochs):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
        with torch.no_grad():
            right = model(test_set[0].to(run.device)).argmax(1).cpu() == test_set[1]
        run.print(f"epoch {epoch + 1} test accuracy {right.double().mean():.4f}")
    run.export(args.out)


if __name__ == "__main__":
    main()
