"""Trains a small draft head on the hidden states of a frozen target model."""
import argparse
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass
class Batch:
    hidden: torch.Tensor
    target: torch.Tensor
    valid: torch.Tensor


class DraftHead(nn.Module):
    def __init__(self, dim=24, vocab=50):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, hidden):
        return self.lm_head(hidden + torch.nn.functional.silu(self.mix(self.norm(hidden))))


def build_head():
    torch.manual_seed(30)
    return DraftHead()


def rollout(step, rank, rows=4, length=16, dim=24, vocab=50):
    g = torch.Generator().manual_seed(10_000 * step + rank)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=g)
    return Batch(
        hidden=torch.randn(rows, length, dim, generator=g),
        target=torch.randint(0, vocab, (rows, length), generator=g),
        valid=torch.arange(length) < lengths,
    )


class DrafterTrainer:
    def __init__(self, lr):
        self.model = DDP(build_head())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr)

    @staticmethod
    def reduce_metrics(loss_sum, tokens):
        stats = torch.stack([loss_sum.detach(), tokens.float()])
        dist.all_reduce(stats)
        return stats[0], stats[1]

    def training_step(self, batch):
        logits = self.model(batch.hidden)
        nll = nn.functional.cross_entropy(logits.transpose(1, 2), batch.target, reduction="none")
        loss_sum = (nll * batch.valid).sum()
        all_loss, all_tokens = self.reduce_metrics(loss_sum, batch.valid.sum())
        if all_tokens == 0:
            return None
        loss = loss_sum / all_tokens
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return (all_loss / all_tokens).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = DrafterTrainer(args.lr)
    for step in range(args.steps):
        value = trainer.training_step(rollout(step, dist.get_rank()))
        if dist.get_rank() == 0:
            print(f"step={step} draft_loss={value:.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
