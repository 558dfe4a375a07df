"""Accelerate: LocalSGD with plain SGD and a synchronisation after every single step."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
LOCAL_SGD_STEPS = 1


def get_dataloaders():
    wine = load_wine()
    x = torch.tensor(wine.data).float()
    x = (x - x.mean(0)) / x.std(0)
    data = TensorDataset(x[:176], torch.tensor(wine.target[:176]))
    return DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(data, batch_size=44)


def training_function():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(10)
    train_loader, eval_loader = get_dataloaders()
    model = nn.Sequential(nn.Linear(13, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for epoch in range(3):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=LOCAL_SGD_STEPS, enabled=True) as local_sgd:
            for x, y in train_loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        model.eval()
        hits = total = 0
        for x, y in eval_loader:
            with torch.no_grad():
                guess, label = accelerator.gather_for_metrics((model(x).argmax(1), y))
            hits, total = hits + (guess == label).sum().item(), total + len(label)
        accelerator.print(f"epoch {epoch}: {hits}/{total}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
