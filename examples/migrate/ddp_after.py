"""ddp_before.py with Paceline. paceline run --nproc 2 examples/migrate/ddp_after.py"""

import torch
from job import digits, network, options
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.data.loader import Loader


@torch.no_grad()
def accuracy(run: paceline.Run, model: nn.Module, loader: Loader) -> float:
    model.eval()
    right = [(model(x).argmax(1) == y) for x, y in loader]
    model.train()
    return run.ratio(sum(int(part.sum()) for part in right), sum(len(part) for part in right))


def main() -> None:
    args = options(batch=60)  # of all processes together
    run = paceline.start(seed=0)

    train_set, test_set = digits()
    train_loader = run.loader(train_set, global_batch=args.batch, shuffle=True)
    test_loader = run.loader(test_set, global_batch=256, train=False)

    model = network(nn.BatchNorm2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)

    for epoch in run.epochs(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer)
        run.print(f"epoch {epoch + 1} test accuracy {accuracy(run, model, test_loader):.4f}")
    run.export(args.out)


if __name__ == "__main__":
    main()
