"""fabric_before.py with Paceline. paceline run --nproc 2 examples/migrate/fabric_after.py"""

import torch
from job import digits, network, options
from torch.nn import functional as F

import paceline


def main() -> None:
    args = options(batch=60)  # of all processes together
    run = paceline.start(seed=0)
    train_set, test_set = digits()
    train_loader = run.loader(train_set, global_batch=args.batch, shuffle=True)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)

    for epoch in run.epochs(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer)
        with torch.no_grad():  # all of it on every process
            images, labels = test_set.tensors
            right = model(images.to(run.device)).argmax(1) == labels.to(run.device)
        run.print(f"epoch {epoch + 1} test accuracy {right.double().mean():.4f}")
    run.export(args.out)


if __name__ == "__main__":
    main()
