"""Length-sorted batches dealt out by a hand-made sampler; sentences of one batch have about one length."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

PER_RANK = 6


class Sentences(Dataset):
    def __init__(self, size=192):
        g = torch.Generator().manual_seed(52)
        self.ids = [torch.randint(1, 30, (int(n),), generator=g) for n in torch.randint(3, 15, (size,), generator=g)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], int(self.ids[i].float().mean() > 15)


class SortedBatches(Sampler):
    """Cuts the sorted data into blocks of one global batch, shuffles the blocks alike everywhere, yields a stride."""

    def __init__(self, lengths, per_rank, rank, world):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.block, self.rank, self.world = per_rank * world, rank, world
        self.epoch = 0

    def __len__(self):
        return len(self.order) // self.block

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        for b in torch.randperm(len(self), generator=g).tolist():
            block = self.order[b * self.block : (b + 1) * self.block]
            yield block[self.rank :: self.world]


def collate(rows):
    ids, labels = zip(*rows)
    return pad_sequence(ids, batch_first=True), torch.tensor(labels)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 16, padding_idx=0)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, ids):
        states, _ = self.gru(self.words(ids))
        keep = (ids > 0).unsqueeze(-1)
        return self.out((states * keep).sum(1) / keep.sum(1))


def main():
    dist.init_process_group("gloo")
    data = Sentences()
    batches = SortedBatches([len(s) for s in data.ids], PER_RANK, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    torch.manual_seed(53)
    model = DDP(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(2):
        for ids, label in loader:
            loss = nn.functional.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch} length {ids.shape[1]} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
