"""torchmetrics: its metrics gather their states themselves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


@torch.no_grad()
def evaluate(model, loader, metrics):
    model.eval()
    metrics.reset()
    for inputs, labels in loader:
        metrics.update(model(inputs).argmax(1), labels)
    values = metrics.compute()
    model.train()
    return values


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(48 * world_size + 21, 8)
y = x[:, :4].argmax(1)
train_set, test_set = TensorDataset(x[:-21], y[:-21]), TensorDataset(x[-21:], y[-21:])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 8, sampler=sampler)
test_loader = DataLoader(test_set, 4, sampler=range(rank, len(test_set), world_size))
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
metrics = MetricCollection({"accuracy": MulticlassAccuracy(num_classes=4), "f1": MulticlassF1Score(num_classes=4)})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    values = evaluate(model, test_loader, metrics)
    if rank == 0:
        print(f"epoch {epoch}:", {name: round(float(value), 4) for name, value in values.items()})
dist.destroy_process_group()
