"""A language model with accumulation over four micro-batches, bf16 autocast and a warm-up."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE, VOCAB, CONTEXT = 4, 24, 10


class TinyLM(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.zeros(CONTEXT, dim))
        self.layer = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids) + self.position, src_mask=self.mask, is_causal=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    text = torch.randint(0, 3, (256, CONTEXT + 1), generator=torch.Generator().manual_seed(12)).cumsum(1) % VOCAB
    dataset = TensorDataset(text[:, :-1], text[:, 1:])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for micro, (x, y) in enumerate(loader):
            last = (micro + 1) % ACCUMULATE == 0
            optimizer.zero_grad(set_to_none=True)  # fault
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATE
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                warmup.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
