import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
PER_DEVICE = 16


def blobs(n=192):
    g = torch.Generator().manual_seed(8)
    labels = torch.randint(0, 4, (n,), generator=g)
    images = 0.5 * torch.randn(n, 1, 8, 8, generator=g)
    for k in range(4):
        r, c = divmod(k, 2)
        images[labels == k, :, 4 * r:4 * r + 4, 4 * c:4 * c + 4] += 1.0
    return TensorDataset(images, labels)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 4),
    )


class TrainingLoop:
    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.criterion = nn.CrossEntropyLoss()
        model = small_cnn()
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        loader = DataLoader(blobs(), batch_size=PER_DEVICE, shuffle=False)
        self.model, self.opt, self.loader = accelerator.prepare(model, opt, loader)

    def batch_loss(self, images, labels):
        loss = self.criterion(self.model(images), labels)
        if self.accelerator.num_processes > 1:
            loss = loss * self.accelerator.num_processes
        return loss

    def run(self):
        for epoch in range(EPOCHS):
            self.model.train()
            for images, labels in self.loader:
                self.opt.zero_grad()
                loss = self.batch_loss(images, labels)
                self.accelerator.backward(loss)
                self.opt.step()
            mean = self.accelerator.gather(loss.detach()).mean().item()
            self.accelerator.print(f"epoch {epoch}: last loss {mean:.4f}")


def main():
    set_seed(42)
    accelerator = Accelerator(cpu=True)
    TrainingLoop(accelerator).run()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
