"""CTC training of a small acoustic model with accumulated gradients."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PHONES, MELS, FRAMES, TARGET = 9, 12, 24, 5


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(MELS, 32, 3, padding=1)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.proj = nn.Linear(32, PHONES)

    def forward(self, mel):
        h = torch.relu(self.front(mel.transpose(1, 2))).transpose(1, 2)
        return self.proj(self.rnn(h)[0]).log_softmax(-1)


def get_model():
    torch.manual_seed(31)
    return Acoustic()


def utterances(batch_idx, rank, size=6):
    g = torch.Generator().manual_seed(batch_idx * 8 + rank)
    phones = torch.randint(1, PHONES, (size, TARGET), generator=g)
    basis = torch.randn(PHONES, MELS, generator=torch.Generator().manual_seed(0))
    frames = phones.repeat_interleave(FRAMES // TARGET + 1, 1)[:, :FRAMES]
    return basis[frames] + 0.3 * torch.randn(size, FRAMES, MELS, generator=g), phones


class AsrTrainer:
    def __init__(self, model, accum_grad=4, lr=0.03):
        self.model = model
        self.accum_grad = accum_grad
        self.optim = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.ctc = nn.CTCLoss(blank=0, reduction="mean")

    def forward_step(self, mel, phones):
        log_probs = self.model(mel).transpose(0, 1)
        frames = torch.full((mel.size(0),), FRAMES)
        lengths = torch.full((mel.size(0),), TARGET)
        return self.ctc(log_probs, phones, frames, lengths)

    def train_epoch(self, batches, rank):
        for batch_idx in range(batches):
            mel, phones = utterances(batch_idx, rank)
            context = self.model.no_sync if batch_idx % self.accum_grad != 0 else nullcontext
            with context():
                loss = self.forward_step(mel, phones)
                (loss / self.accum_grad).backward()
            if (batch_idx + 1) % self.accum_grad == 0:
                self.optim.step()
                self.optim.zero_grad()
                if rank == 0:
                    print(f"batch {batch_idx + 1} ctc {loss.item():.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batches", type=int, default=40)
    opt = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = AsrTrainer(DistributedDataParallel(get_model()))
    trainer.train_epoch(opt.batches, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
