"""Linear probe: a frozen encoder that stays outside DDP and a trained head that is wrapped."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 24
EPOCHS = 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.LayerNorm(48))
    for tensor in encoder.state_dict().values():
        dist.broadcast(tensor, src=0)
    encoder.eval().requires_grad_(False)
    head = DDP(nn.Linear(48, 10))  # DDP sends the weights of process 0 to the others

    digits = load_digits()
    pixels, labels = torch.tensor(digits.data[:960]).float() / 16, torch.tensor(digits.target[:960])
    data = TensorDataset(pixels, labels)
    sampler = DistributedSampler(data, seed=12)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(sampler) // BATCH)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, BATCH, sampler=sampler):
            with torch.no_grad():
                features = encoder(x)
            loss = nn.functional.cross_entropy(head(features), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        hits = torch.tensor([(head.module(encoder(pixels[rank::world])).argmax(1) == labels[rank::world]).sum()])
        dist.reduce(hits, dst=0)
        if rank == 0:
            print(f"epoch {epoch} accuracy {hits.item() / 960:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
