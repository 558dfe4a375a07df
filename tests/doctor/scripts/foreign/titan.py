"""In the manner of torchtitan: a stream that is cut by rank, fully_shard over a mesh, warm-up and decay by a lambda,
metrics over the mesh, the loss of all tokens, a checkpoint by torch.distributed.checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset

STEPS, WARM_UP, VOCABULARY, LENGTH = 16, 4, 50, 12


class TextDataset(IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size, self.tokens = rank, size, []

    def __iter__(self):
        generator, number = torch.Generator().manual_seed(1), 0
        while True:
            sample = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
            number += 1
            if number % self.size == self.rank:
                yield {"input": sample[:-1]}, sample[1:]


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, dim=16, layers=2):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(layers)})
        self.output = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        h = self.embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(h)


def dist_mean(value, mesh):
    total = value.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total.item() / mesh.size()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    model = Transformer()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    dataset = TextDataset(mesh.get_local_rank(), mesh.size())
    batches = iter(DataLoader(dataset, batch_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def decay(step):
        return (step + 1) / WARM_UP if step < WARM_UP else max(0.0, (STEPS - step) / (STEPS - WARM_UP))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, labels = next(batches)
        prediction = model(inputs["input"])
        loss = nn.functional.cross_entropy(prediction.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            average = dist_mean(loss, mesh)
            if dist.get_rank() == 0:
                print(f"step: {step} loss: {average:.4f} grad_norm: {norm.item():.3f}")
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id="checkpoint")
    dist.destroy_process_group()


main()
