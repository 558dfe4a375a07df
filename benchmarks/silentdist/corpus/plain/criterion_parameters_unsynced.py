"""Multi-task learning with learned uncertainties (Kendall et al. 2018), which live in the criterion."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class UncertaintyLoss(nn.Module):
    def __init__(self, tasks=2):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses):
        return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_var, losses))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Sequential(nn.Linear(10, 32), nn.ReLU()), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.a(h), self.b(h).squeeze(1)


dist.init_process_group("gloo")
torch.manual_seed(3)
g = torch.Generator().manual_seed(0)
x = torch.randn(320, 10, generator=g)
data = TensorDataset(x, x[:, :3].argmax(1), x.sum(1))
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=20, sampler=sampler, drop_last=True)
model = DDP(TwoHeads())
criterion = UncertaintyLoss()  # fault
optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=5e-3)  # fault
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, label, value in loader:
        logits, predicted = model(inputs)
        losses = [nn.functional.cross_entropy(logits, label), nn.functional.mse_loss(predicted, value)]
        optimizer.zero_grad()
        criterion(losses).backward()  # fault
        optimizer.step()  # fault
dist.destroy_process_group()
