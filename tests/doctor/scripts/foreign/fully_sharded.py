"""fully_shard by hand: clipping, a reduced mean, the whole state gathered by all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (world,))
x = torch.randn(64, 8)
y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
s = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True)
loader = DataLoader(ds, 4, sampler=s)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    s.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= world
    if rank == 0:
        print(f"epoch {epoch} loss {mean.item():.3f}")
state = {k: v.full_tensor() for k, v in model.state_dict().items()}
if rank == 0:
    torch.save(state, "model.pt")
dist.barrier()
dist.destroy_process_group()
