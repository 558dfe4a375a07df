"""Fine-tuning: the last layer is replaced when the model is wrapped already."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(20, 40), nn.ReLU())
        self.fc = nn.Linear(40, classes)

    def forward(self, x):
        return self.fc(self.features(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Backbone(), find_unused_parameters=True)
    model.module.fc = nn.Linear(40, 5)  # fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(300, 20, generator=g)
    data = TensorDataset(x, x[:, :5].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=25, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
