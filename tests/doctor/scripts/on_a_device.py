"""DDP as on devices: one for each rank, pinned memory, workers. Where there are none, a stand-in says what torch would
ask of the driver: it is slow to synchronise and to give memory back, and knows which device holds memory."""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def stand_in(device):
    torch.cuda.is_available = torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
    torch.cuda._lazy_init = lambda: None
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.device_count = lambda: dist.get_world_size()
    torch.cuda.current_device = lambda: device
    torch.cuda.memory_allocated = lambda asked=device: 1000 * (asked == device)
    torch._C._cuda_synchronize = torch._C._cuda_emptyCache = lambda: time.sleep(0.005)


class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum().unsqueeze(0)


def main():
    bf16 = "--bf16" in sys.argv
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = Points()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, pin_memory=True)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stand_in(rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, bf16)
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")


def train(model, loader, optimizer, bf16):
    for inputs, targets in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
