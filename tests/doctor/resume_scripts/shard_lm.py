"""A character model sharded with fully_shard; sharded checkpoints of torch.distributed.checkpoint."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, BLOCK = 32, 16


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(BLOCK, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def text(n):
    return torch.randint(0, 4, (n, BLOCK + 1), generator=torch.Generator().manual_seed(5)).cumsum(1) % VOCAB


def save_checkpoint(out, step, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    dcp.save(state, checkpoint_id=f"{out}/.writing")
    if dist.get_rank() == 0:
        os.rename(f"{out}/.writing", f"{out}/step-{step}")
    dist.barrier()


def load_checkpoint(path, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--load", help="a step-N folder to continue from")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler = DistributedSampler(TensorDataset(text(160)), seed=3)
    loader = DataLoader(sampler.dataset, batch_size=8, sampler=sampler)
    model, mesh = CharLM(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = load_checkpoint(args.load, model, optimizer) if args.load else 0

    for epoch in range(step // len(loader), 2):
        sampler.set_epoch(epoch)
        for (ids,) in itertools.islice(loader, step - epoch * len(loader), None):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"rank {dist.get_rank()} step {step}: loss {loss.item():.4f}", flush=True)
            if step % 4 == 0:
                save_checkpoint(args.out, step, model, optimizer)
    weights = {name: w.full_tensor() for name, w in model.state_dict().items()}
    if os.environ.get("FINAL") and dist.get_rank() == 0:
        torch.save(weights, os.environ["FINAL"])
    dist.destroy_process_group()


main()
