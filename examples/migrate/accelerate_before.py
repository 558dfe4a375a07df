"""Accelerate. accelerate launch (or torchrun --nproc-per-node 2) examples/migrate/accelerate_before.py"""

import torch
from accelerate import Accelerator
from job import digits, network, options
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    args = options(batch=30)  # of each process
    accelerator = Accelerator()
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=128)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Counted in steps of one process: the prepared schedule moves num_processes times at each step.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        right = []
        model.eval()
        for x, y in test_loader:
            with torch.no_grad():
                right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
        model.train()
        accelerator.print(f"epoch {epoch + 1} test accuracy {torch.cat(right).double().mean():.4f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
