"""Muon on weights that fully_shard has cut: it orthogonalises whole matrices."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def orthogonalise(matrix, steps=5):
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def whole(part, like):
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    ).full_tensor()


def shard(matrix, like):
    return distribute_tensor(matrix, like.device_mesh, like.placements).to_local()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.to_local()
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(gradient))
                momentum.mul_(group["momentum"]).add_(gradient)
                update = shard(orthogonalise(whole(momentum, p)), p)
                p.to_local().add_(update, alpha=-group["lr"])


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 12)
ds = TensorDataset(x, x[:, :4].argmax(1))
sampler = DistributedSampler(ds)
loader = DataLoader(ds, 4, sampler=sampler)
model = nn.Sequential(nn.Linear(12, 36), nn.ReLU(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 4))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
matrices = [p for p in model.parameters() if p.ndim == 2]
optimizers = [Muon(matrices), torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], 1e-3)]
for epoch in range(1):
    sampler.set_epoch(epoch)
    for a, b in loader:
        nn.functional.cross_entropy(model(a), b).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
