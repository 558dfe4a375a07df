"""Customers who leave: a perceptron with dropout on a table of numbers, DDP, AdamW."""

import argparse
import os
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Customers(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(11)
        self.rows = torch.randn(n, 20, generator=g)
        self.left = ((self.rows[:, :5].sum(1) + 0.5 * torch.randn(n, generator=g)) > 0).float()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.left[i]


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="runs/churn")
    p.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--seed", type=int, default=21)
    return p.parse_args()


def newest(folder):
    steps = [int(m.group(1)) for m in (re.fullmatch(r"ckpt_(\d+)\.pth", f) for f in os.listdir(folder)) if m]
    return os.path.join(folder, f"ckpt_{max(steps)}.pth") if steps else None


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(args.out, exist_ok=True)

    torch.manual_seed(args.seed)
    net = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = Customers()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler, generator=torch.Generator().manual_seed(args.seed))
    torch.manual_seed(args.seed + rank)  # different dropout masks on each rank

    step, resumed = 0, None
    if args.resume and newest(args.out):
        resumed = torch.load(newest(args.out))
        net.load_state_dict(resumed["net"])
        optimizer.load_state_dict(resumed["optimizer"])
        step = resumed["step"]
        torch.set_rng_state(resumed["rng"])

    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(step // len(loader), args.epochs):
        sampler.set_epoch(epoch)
        already = step - epoch * len(loader)
        for i, (rows, left) in enumerate(loader):
            if i < already:
                continue
            loss = criterion(model(rows).squeeze(1), left)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if rank == 0 and step % 4 == 0:
                path = os.path.join(args.out, f"ckpt_{step}.pth")
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                state["rng"] = torch.get_rng_state()
                torch.save(state, path + ".part")
                os.replace(path + ".part", path)
            if rank == 0 and step % 2 == 0:
                print(f"[{epoch}] step {step:3d}  loss {loss.item():.4f}", flush=True)

    if rank == 0 and os.environ.get("FINAL"):
        torch.save(net.state_dict(), os.environ["FINAL"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
