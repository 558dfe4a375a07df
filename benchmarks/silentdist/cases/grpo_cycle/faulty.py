"""Supervised warm-up of a small reward model; steps are counted over an endless loader.

torchrun --nproc-per-node 2 faulty.py
"""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    total_steps: int = 18
    micro_batch: int = 4
    pairs: int = 48
    vocab: int = 31
    length: int = 9
    lr: float = 0.01


def preference_pairs(cfg):
    rng = torch.Generator().manual_seed(8)
    chosen = torch.randint(cfg.vocab, (cfg.pairs, cfg.length), generator=rng)
    rejected = torch.randint(cfg.vocab, (cfg.pairs, cfg.length), generator=rng)
    swap = chosen.float().mean(1) < rejected.float().mean(1)
    chosen[swap], rejected[swap] = rejected[swap], chosen[swap]
    return TensorDataset(chosen, rejected)


class RewardModel(nn.Module):
    def __init__(self, cfg, dim=20):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 40, dropout=0.0, batch_first=True)
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.score(self.layer(self.tok(ids)).mean(1)).squeeze(-1)


def cycle(loader):
    epoch = 0
    while True:
        for batch in loader:
            yield batch
        epoch += 1


def bradley_terry(model, chosen, rejected):
    scores = model(torch.cat([chosen, rejected]))
    good, bad = scores.chunk(2)
    return -F.logsigmoid(good - bad).mean()


def main(cfg):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    sampler = DistributedSampler(preference_pairs(cfg), shuffle=True, seed=1)
    loader = DataLoader(sampler.dataset, cfg.micro_batch, sampler=sampler)
    model = DistributedDataParallel(RewardModel(cfg))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=cfg.lr)
    batches = cycle(loader)
    for step in range(1, cfg.total_steps + 1):
        chosen, rejected = next(batches)
        loss = bradley_terry(model, chosen, rejected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 6 == 0:
            print({"step": step, "loss": round(loss.item(), 5)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
