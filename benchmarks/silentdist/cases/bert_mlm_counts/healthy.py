"""Masked language model on a toy corpus."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import BertConfig, BertForMaskedLM

PAD, MASK, FIRST, VOCAB = 0, 1, 4, 96


class ToyCorpus(Dataset):
    def __init__(self, n=128, longest=28, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(5, longest + 1, (1,), generator=g))
            self.rows.append(torch.randint(FIRST, VOCAB, (length,), generator=g))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return i, self.rows[i]


def collate(items, prob=0.2):
    width = max(len(row) for _, row in items)
    ids = torch.full((len(items), width), PAD)
    labels = torch.full((len(items), width), -100)
    for k, (i, row) in enumerate(items):
        g = torch.Generator().manual_seed(1000 + i)
        pick = torch.rand(len(row), generator=g) < prob
        pick[0] = True
        ids[k, : len(row)] = torch.where(pick, torch.tensor(MASK), row)
        labels[k, : len(row)][pick] = row[pick]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def build_model():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, pad_token_id=PAD)
    return BertForMaskedLM(config)


def make_loader(rank, world, batch_size):
    data = ToyCorpus()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=11)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, collate_fn=collate), sampler


def mlm_loss(model, batch):
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    masked = (labels != -100).sum()
    dist.all_reduce(masked)
    return total * dist.get_world_size() / masked


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader, sampler = make_loader(rank, world, args.batch_size)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = mlm_loss(model, batch)
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % 4 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
