"""Distils a teacher into a small student; the teacher is not wrapped and every process holds a copy."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 25
TEMPERATURE, SOFT = 3.0, 0.7


def pretrained_teacher(x, y):
    """A closed-form ridge classifier on random features plays the pre-trained teacher."""
    g = torch.Generator().manual_seed(55)
    hidden = torch.randn(64, 200, generator=g) / 4
    features = torch.relu(x @ hidden)
    gram = features.T @ features + 5 * torch.eye(200)
    return hidden, torch.linalg.solve(gram, features.T @ F.one_hot(y, 10).to(x.dtype)) * 8


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    digits = load_digits()
    x, y = torch.tensor(digits.data[:600]).float() / 16, torch.tensor(digits.target[:600])
    hidden, readout = pretrained_teacher(x, y)
    torch.manual_seed(56)
    student = DDP(nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 10)))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3, eps=1e-6)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            with torch.no_grad():
                wise = torch.relu(a @ hidden) @ readout
            logits = student(a)
            soft = F.kl_div(
                F.log_softmax(logits / TEMPERATURE, 1), F.softmax(wise / TEMPERATURE, 1), reduction="batchmean"
            )
            loss = SOFT * TEMPERATURE**2 * soft + (1 - SOFT) * F.cross_entropy(logits, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
