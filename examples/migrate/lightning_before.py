"""Lightning's Trainer and a LightningModule. python examples/migrate/lightning_before.py --devices 2"""

from typing import Any

import lightning
import torch
from job import digits, network, options
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.net, self.epochs = network(), epochs

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, number: int = 0) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int = 0) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).double().mean(), sync_dist=True)  # a mean of means

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]  # by epoch


def main() -> None:
    args = options(batch=30)  # of each process
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=128)

    model = Digits(args.epochs)
    trainer = lightning.Trainer(
        devices=args.devices, strategy="ddp", max_epochs=args.epochs, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, train_loader, test_loader)
    if trainer.is_global_zero:
        print(f"test accuracy {trainer.callback_metrics['accuracy']:.4f}")
        torch.save(model.net.state_dict(), args.out)


if __name__ == "__main__":
    main()
