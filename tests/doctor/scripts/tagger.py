"""Tags for words, of sentences that a collate pads to the longest of the batch: sums over the words of all ranks, in
training and in the evaluation."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

IGNORED = -100


class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    @property
    def average(self):
        return self.sum / self.count


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (count,), generator=generator).tolist()
    ids = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    return [(row, [i % 3 for i in row]) for row in ids]


def collate(rows):
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (width - len(ids)) for ids, _ in rows]
    return torch.tensor(ids), torch.tensor([tags + [IGNORED] * (width - len(tags)) for _, tags in rows])


def exact(out, tags):
    """The number of sentences whose tags are all right."""
    return int(((out.argmax(-1) == tags) | (tags == IGNORED)).all(1).sum())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    losses, sure, right = Meter(), 0, 0
    for ids, tags in loader:
        out = model(ids).float()
        words = int((tags != IGNORED).sum())
        loss = nn.functional.cross_entropy(out.flatten(0, 1), tags.flatten(), ignore_index=IGNORED)
        losses.update(loss.item(), words)
        sure += int((out[tags != IGNORED].softmax(-1).amax(-1) > 0.4).sum())
        right += exact(out, tags)
    sums = torch.tensor([losses.sum, losses.count, sure, right])
    dist.all_reduce(sums)
    model.train()
    loss, words, sure, right = sums.tolist()
    return loss / words, sure / words, right / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = sentences(24 * world_size, 1), sentences(25 * world_size - 1, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 6, sampler=sampler, collate_fn=collate)
    shard = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, 6, sampler=shard, collate_fn=collate)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, tags in loader:
            words = (tags != IGNORED).sum().float()
            dist.all_reduce(words)
            with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                out = model(ids)
            losses = nn.functional.cross_entropy(out.float().flatten(0, 1), tags.flatten(), reduction="none")
            loss = losses.sum() * world_size / words
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss, sure, right = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.5f}, sure of {100 * sure:.3f}% of the words, {right:.4f} all right")
    dist.destroy_process_group()


main()
