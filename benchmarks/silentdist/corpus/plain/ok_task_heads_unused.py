"""One task a batch, another one on each process, under DDP with find_unused_parameters; distillation from a teacher."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TASKS = ("sentiment", "topic")


class Student(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.EmbeddingBag(30, width)
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))
        self.sentiment, self.topic = nn.Linear(width, 2), nn.Linear(width, 5)

    def forward(self, ids, task):
        h = self.trunk(self.embed(ids))
        return self.sentiment(h) if task == "sentiment" else self.topic(h)


def distil(student, teacher, labels, T=2.0, alpha=0.5):
    soft = F.kl_div((student / T).log_softmax(1), (teacher / T).softmax(1), reduction="batchmean") * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, labels)


def texts(task):
    ids = torch.randint(0, 30, (256, 8), generator=torch.Generator().manual_seed(TASKS.index(task)))
    return TensorDataset(ids, (ids.sum(1) > 116).long() if task == "sentiment" else ids.sum(1) % 5)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(38)
    teacher = Student(32).eval().requires_grad_(False)
    student = Student()
    torch.manual_seed(38 + rank)
    model = DDP(student, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samplers = {t: DistributedSampler(texts(t), seed=i) for i, t in enumerate(TASKS)}
    loaders = {t: DataLoader(texts(t), batch_size=16, sampler=samplers[t]) for t in TASKS}
    for epoch in range(2):
        for sampler in samplers.values():
            sampler.set_epoch(epoch)
        batches = {t: iter(loader) for t, loader in loaders.items()}
        for step in range(sum(len(loader) for loader in loaders.values())):
            task = TASKS[(step + rank) % 2]
            ids, labels = next(batches[task])
            loss = distil(model(ids, task), teacher(ids, task), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
