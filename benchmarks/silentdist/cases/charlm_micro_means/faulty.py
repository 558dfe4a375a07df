"""Character model with gradient accumulation over sentences of different length."""
import contextlib
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

IGNORE = -100
config = dict(vocab=40, hidden=48, micro_batch=4, accumulate=4, lr=0.5, epochs=2, sentences=320)


class CharGRU(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def build_model():
    torch.manual_seed(7)
    return CharGRU(config["vocab"], config["hidden"])


def sentences():
    g = torch.Generator().manual_seed(21)
    out = []
    for _ in range(config["sentences"]):
        n = 3 + int(torch.randint(0, 6, (1,), generator=g)) ** 2
        out.append(torch.randint(1, config["vocab"], (n,), generator=g))
    return out


def collate(batch):
    x = pad_sequence([s[:-1] for s in batch], batch_first=True)
    y = pad_sequence([s[1:] for s in batch], batch_first=True, padding_value=IGNORE)
    return x, y


def loader_for(rank, world):
    data = sentences()
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=2)
    return DataLoader(data, config["micro_batch"], sampler=sampler, collate_fn=collate, drop_last=True)


def chunks(iterable, n):
    it = iter(iterable)
    while len(part := list(itertools.islice(it, n))) == n:
        yield part


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")


def optimise(model, opt, window):
    opt.zero_grad()
    running = 0.0
    for i, (x, y) in enumerate(window):
        last = i == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model, x, y) / (y != IGNORE).sum()
            loss = loss / len(window)
            loss.backward()
        running += loss.item()
    opt.step()
    return running


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(build_model())
    opt = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = loader_for(rank, world)
    update = 0
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for window in chunks(loader, config["accumulate"]):
            value = optimise(model, opt, window)
            update += 1
            if rank == 0:
                print("update", update, "loss", round(value, 4), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
