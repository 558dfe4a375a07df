"""A language model on padded sentences: the sum over tokens and their count, in micro-batches, with clipping."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

VOCAB, LENGTH = 31, 20


class TinyTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, width, padding_idx=0), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.token(x) + self.position.weight[: x.shape[1]]
        return self.head(self.encoder(h, mask=mask, is_causal=True))


def loss_fn(model, batch):
    (tokens,) = batch
    target = tokens[:, 1:]
    total = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    return paceline.Total(total, (target != 0).sum())


g = torch.Generator().manual_seed(3)
tokens = torch.randint(1, VOCAB, (200, LENGTH), generator=g)
tokens[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (200, 1), generator=g)] = 0

run = paceline.start(seed=3)
model = TinyTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(tokens), global_batch=32, micro_batch=4, shuffle=True)
for epoch in run.epochs(1):
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer, max_grad_norm=0.5)
