"""Power demand in the order of time: nothing is shuffled and every epoch is the same."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WINDOW, BATCH = 12, 16


class Demand(Dataset):
    def __init__(self, hours=268):
        t = torch.arange(hours).float()
        self.series = torch.sin(t * 6.2832 / 24) + 0.3 * torch.sin(t * 6.2832 / 168) + 0.05 * torch.cos(t * 1.7)

    def __len__(self):
        return len(self.series) - WINDOW

    def __getitem__(self, i):
        return self.series[i : i + WINDOW], self.series[i + WINDOW]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        states, _ = self.lstm(x.unsqueeze(-1))
        return self.out(states[:, -1]).squeeze(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(51)
    model = DDP(Forecaster())
    data = Demand()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
