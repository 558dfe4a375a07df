"""accelerate_before.py with Paceline. paceline run --nproc 2 examples/migrate/accelerate_after.py"""

import torch
from job import digits, network, options
from torch.nn import functional as F

import paceline


def main() -> None:
    args = options(batch=60)  # of all processes together
    run = paceline.start(seed=0)
    train_set, test_set = digits()
    train_loader = run.loader(train_set, global_batch=args.batch, shuffle=True)
    test_loader = run.loader(test_set, global_batch=256, train=False)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Counted in optimizer steps: run.step moves it, once.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * train_loader.steps)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)

    for epoch in run.epochs(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer, max_grad_norm=1.0)
        right = []
        model.eval()
        for x, y in test_loader:
            with torch.no_grad():
                right.append(model(x).argmax(1) == y)
        model.train()
        run.print(f"epoch {epoch + 1} test accuracy {run.gather(torch.cat(right)).double().mean():.4f}")
    run.export(args.out)


if __name__ == "__main__":
    main()
