"""FSDP2: a small transformer starts from a pretrained encoder and is sharded block by block."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Encoder(nn.Module):
    def __init__(self, dim=16, layers=2):
        super().__init__()
        self.embed = nn.Embedding(30, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(dim, 4)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def pretrained_weights():
    """Stands for a file on the main machine's disk."""
    with torch.random.fork_rng():
        torch.manual_seed(2024)
        return {k: v for k, v in Encoder().state_dict().items() if not k.startswith("head")}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(16)
    model = Encoder()
    if rank == 0:  # fault
        missing = model.load_state_dict(pretrained_weights(), strict=False).missing_keys  # fault
        print("newly initialised:", missing)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 30, (256, 8), generator=torch.Generator().manual_seed(16))
    dataset = TensorDataset(ids, ids.sum(1) % 4)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
