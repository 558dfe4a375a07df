"""Lightning Fabric. python examples/migrate/fabric_before.py --devices 2"""

import torch
from job import digits, network, options
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    args = options(batch=30)  # of each process
    fabric = Fabric(devices=args.devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    train_set, test_set = digits()
    train_loader = fabric.setup_dataloaders(DataLoader(train_set, batch_size=args.batch, shuffle=True))

    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(module, optimizer)

    for epoch in range(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        with torch.no_grad():  # all of it on every process
            images, labels = test_set.tensors
            right = model(fabric.to_device(images)).argmax(1) == fabric.to_device(labels)
        fabric.print(f"epoch {epoch + 1} test accuracy {right.double().mean():.4f}")
    fabric.save(args.out, {"model": model})


if __name__ == "__main__":
    main()
