"""nn.DataParallel: one process, all GPUs. python examples/migrate/data_parallel_before.py"""

import torch
from job import digits, network, options
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    args = options(batch=60)  # of all GPUs together
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)

    model = nn.DataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        for x, y in train_loader:
            outputs = model(x.to(device))  # gathered on the first GPU
            loss = F.cross_entropy(outputs, y.to(device))  # and the loss is computed there
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = test_set.tensors
            right = model(images.to(device)).argmax(1) == labels.to(device)
        print(f"epoch {epoch + 1} test accuracy {right.double().mean():.4f}")
    torch.save(model.module.state_dict(), args.out)


if __name__ == "__main__":
    main()
