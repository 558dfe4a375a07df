"""A language model; training calls model.module, because the wrapper lacks the method loss()."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LM(nn.Module):
    def __init__(self, vocabulary=30, width=32):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])

    def loss(self, x):
        return nn.functional.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def setup():
    dist.init_process_group("gloo")
    torch.manual_seed(0)


def train():
    setup()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(0, 30, (256, 12), generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(LM())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = model.module.loss(tokens)  # fault
            loss.backward()  # fault
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


train()
