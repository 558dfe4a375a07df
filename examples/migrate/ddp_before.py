"""The whole template of torch DDP. torchrun --nproc-per-node 2 examples/migrate/ddp_before.py"""

import os
from typing import Any

import torch
import torch.distributed as dist
from job import digits, network, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device, examples: int) -> float:
    model.eval()
    right = torch.cat([(model(x.to(device)).argmax(1) == y.to(device)) for x, y in loader])
    parts = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, right)
    model.train()
    # The sampler gives rank r the examples r, r + n, ... and fills up from the beginning: interleave, cut.
    return torch.stack(parts, 1).flatten()[:examples].float().mean().item()


def main() -> None:
    args = options(batch=30)  # of each process
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=args.batch, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=128, sampler=DistributedSampler(test_set, shuffle=False))

    network_ = network(nn.BatchNorm2d)
    if device.type == "cuda":  # SyncBatchNorm refuses tensors on CPUs
        network_ = nn.SyncBatchNorm.convert_sync_batchnorm(network_)
    model = DistributedDataParallel(
        network_.to(device), device_ids=[local_rank] if device.type == "cuda" else None
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = accuracy(model, test_loader, device, len(test_set))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} test accuracy {score:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
