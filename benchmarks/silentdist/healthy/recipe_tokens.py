"""Causal language model on padded recipes; the loss is a mean over the tokens of all processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LENGTH, PAD = 40, 20, 0
BATCH = 6


class Recipes(Dataset):
    def __init__(self, size=144):
        g = torch.Generator().manual_seed(3)
        self.rows = torch.zeros(size, LENGTH + 1, dtype=torch.long)
        for row in self.rows:
            words = int(torch.randint(4, LENGTH + 1, (1,), generator=g))
            start = int(torch.randint(0, VOCAB, (1,), generator=g))
            row[:words] = 1 + (start + 3 * torch.arange(words)) % (VOCAB - 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i, :-1], self.rows[i, 1:]


class SmallLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.places = nn.Embedding(LENGTH, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        h = self.words(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(SmallLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    data = Recipes()
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = model(x)
            summed = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            tokens = (y != PAD).sum()
            dist.all_reduce(tokens)
            loss = summed * world / tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
