"""Semi-supervised digits: a student in DDP follows labels and a slowly moving teacher kept by every process."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 20
DECAY = 0.9


def build():
    torch.manual_seed(17)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def main(epochs=3):
    dist.init_process_group("gloo")
    digits = load_digits()
    pixels = torch.tensor(digits.data[:400], dtype=torch.float32) / 16
    labelled = torch.arange(400) % 3 == 0
    data = TensorDataset(pixels, torch.tensor(digits.target[:400]), labelled)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, BATCH, sampler=sampler)

    student = DDP(build())
    teacher = AveragedModel(copy.deepcopy(student.module), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y, known in loader:
            logits = student(x)
            with torch.no_grad():
                target = teacher(x).softmax(1)
            count = known.sum()
            dist.all_reduce(count)
            supervised = F.cross_entropy(logits[known], y[known], reduction="sum") / count * dist.get_world_size()
            consistency = F.mse_loss(logits.softmax(1), target)
            loss = supervised + 2.0 * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            teacher.update_parameters(student.module)
        if dist.get_rank() == 0:
            with torch.no_grad():
                right = (teacher(pixels).argmax(1) == data.tensors[1]).double().mean()
            print(f"epoch {epoch} loss {loss.item():.4f} teacher accuracy {right:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
