"""A mixture of experts for padded texts: each term of the loss is a mean over the global batch, or a rank's mean."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, EXPERTS, PAD = 30, 4, 0


class Texts(Dataset):
    def __init__(self, size):
        g = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 20, (size,), generator=g).tolist()
        self.texts = [torch.randint(1, WORDS, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def balance(probabilities, mask):
    """The load balancing loss of the Switch Transformer."""
    probabilities = probabilities[mask]
    counts = F.one_hot(probabilities.argmax(-1), EXPERTS).float().sum(0)
    dist.all_reduce(counts)
    fractions = counts / counts.sum()
    return EXPERTS * (fractions * probabilities.mean(0)).sum()


class Mixture(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.head = nn.Linear(width, WORDS)
        self.value = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.embed(ids)
        probabilities = self.gate(h).float().softmax(-1)
        best = F.one_hot(probabilities.argmax(-1), EXPERTS) * probabilities
        h = h + sum(best[..., n : n + 1] * expert(h) for n, expert in enumerate(self.experts))
        return self.head(h).float(), self.value(h).float().squeeze(-1), probabilities


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    texts = Texts(180)
    sampler = DistributedSampler(texts)
    loader = DataLoader(
        texts, 6, sampler=sampler, collate_fn=lambda texts: nn.utils.rnn.pad_sequence(texts, batch_first=True)
    )
    model = DDP(Mixture())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in loader:
            inputs, targets = ids[:, :-1], ids[:, 1:]
            with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
                logits, values, probabilities = model(inputs)
            mask = targets != PAD
            count = mask.sum()
            dist.all_reduce(count)
            loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD, reduction="sum")
            loss = loss / count * world_size
            value_loss = F.mse_loss(values[mask], targets[mask] / WORDS, reduction="sum") / count * world_size
            penalty = 1e-3 * logits.square().mean()
            loss = loss + 0.5 * value_loss + penalty + 0.01 * balance(probabilities, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
