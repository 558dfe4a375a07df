import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, WIDTH, TEMPERATURE, ALPHA = 32, 24, 2.0, 0.5


class Answers(Dataset):
    """Prompt of random length followed by an answer; -100 marks what is not supervised."""

    def __init__(self, n=144, longest=20):
        self.rows = []
        g = torch.Generator().manual_seed(61)
        for _ in range(n):
            prompt, answer = (int(v) for v in torch.randint(1, longest // 2, (2,), generator=g))
            ids = torch.randint(1, VOCAB, (prompt + answer,), generator=g)
            labels = ids.clone()
            labels[:prompt] = -100
            self.rows.append((F.pad(ids, (0, longest - len(ids))), F.pad(labels, (0, longest - len(ids)), value=-100)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class LM(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Tanh())
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        h = self.body(ids)
        return self.head(h + torch.tanh(self.mix(h.cumsum(1) / 8)))


def teacher_and_student():
    torch.manual_seed(13)
    teacher = LM(2 * WIDTH).requires_grad_(False)
    with torch.no_grad():
        teacher.head.weight.mul_(6)
    return teacher, LM(WIDTH)


def make_loader(rank, world):
    data = Answers()
    return DataLoader(data, batch_size=6, sampler=DistributedSampler(data, world, rank, seed=3))


def distillation_loss(fabric, student_logits, teacher_logits, labels):
    student_logits, teacher_logits, labels = student_logits[:, :-1], teacher_logits[:, :-1], labels[:, 1:]
    answer = labels != -100
    count = fabric.all_reduce(answer.sum(), reduce_op="sum")
    hard = F.cross_entropy(student_logits[answer], labels[answer], reduction="sum")
    hard = hard * fabric.world_size / count
    log_p = F.log_softmax(student_logits[answer] / TEMPERATURE, dim=-1)
    q = F.softmax(teacher_logits[answer] / TEMPERATURE, dim=-1)
    soft = F.kl_div(log_p, q, reduction="sum") * TEMPERATURE ** 2
    soft = soft * fabric.world_size / count
    return ALPHA * hard + (1 - ALPHA) * soft


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    teacher, student = teacher_and_student()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    student, optimizer = fabric.setup(student, optimizer)
    loader = make_loader(fabric.global_rank, fabric.world_size)
    for step, (ids, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = distillation_loss(fabric, student(ids), teacher(ids), labels)
        fabric.backward(loss)
        optimizer.step()
        if step % 3 == 2:
            fabric.print(f"step {step + 1:2d} loss {loss.item():.4f}")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
