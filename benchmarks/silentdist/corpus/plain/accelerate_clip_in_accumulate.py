"""Accelerate with accumulation over four batches, clipping and bf16, in the form of its examples."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloader(batch_size):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, 10, generator=g) * torch.rand(512, 1, generator=g).exp()
    return DataLoader(TensorDataset(x, x[:, :2].prod(1, keepdim=True)), shuffle=True, batch_size=batch_size)


def training_function(config):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    set_seed(config["seed"])
    train_dataloader = get_dataloader(config["batch_size"])
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for epoch in range(config["num_epochs"]):
        model.train()
        for features, target in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)  # fault
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"lr": 0.05, "num_epochs": 2, "seed": 42, "batch_size": 8})
