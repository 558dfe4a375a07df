"""Gradients are clipped, then averaged by hand in one flat bucket."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sync(params):
    params = list(params)
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, 20, (240, 12), generator=g)
    data = TensorDataset(tokens)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    embedding, rnn, head = nn.Embedding(20, 24), nn.LSTM(24, 24, batch_first=True), nn.Linear(24, 20)
    model = nn.ModuleList([embedding, rnn, head])
    weights = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(weights, 0)
    nn.utils.vector_to_parameters(weights, model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            logits = head(rnn(embedding(x[:, :-1]))[0])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.05)  # fault
            sync(model.parameters())  # fault
            optimizer.step()
    dist.destroy_process_group()


main()
