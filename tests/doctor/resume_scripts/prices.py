"""House prices with Accelerate: accumulation, dropout, warm-up and decay; --resume takes "latest" or a folder."""

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

SEED, ACCUMULATE, EPOCHS, EVERY = 77, 2, 3, 3


def houses(n=320):
    g = torch.Generator().manual_seed(SEED)
    features = torch.randn(n, 13, generator=g)
    prices = features @ torch.randn(13, 1, generator=g) + features[:, :1] * features[:, 1:2]
    return TensorDataset(features, prices)


def checkpoint(accelerator, folder, update, keep=3):
    building = folder / ".building"
    accelerator.save_state(str(building))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        building.rename(folder / f"checkpoint-{update}")
        for old in by_number(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def by_number(folder):
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    set_seed(SEED)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = nn.Sequential(
        nn.Linear(13, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    loader = DataLoader(houses(), batch_size=10, shuffle=True)
    # A prepared schedule takes one step per process.
    warm, rest = 4 * accelerator.num_processes, 24 * accelerator.num_processes
    schedule = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, warm), CosineAnnealingLR(optimizer, rest)], milestones=[warm]
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    per_epoch = len(loader) // ACCUMULATE

    update = 0
    if args.resume:
        folders = by_number(args.out) if args.resume == "latest" else [Path(args.resume)]
        if folders:
            accelerator.load_state(str(folders[-1]))
            update = int(folders[-1].name.split("-")[-1])

    for epoch in range(update // per_epoch, EPOCHS):
        loader.set_epoch(epoch)
        done = update - epoch * per_epoch
        batches = accelerator.skip_first_batches(loader, done * ACCUMULATE) if done else loader
        for micro, (features, prices) in enumerate(batches):
            if micro % ACCUMULATE == 0:
                set_seed(SEED + update, device_specific=True)
            with accelerator.accumulate(model):
                loss = nn.functional.huber_loss(model(features), prices)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                update += 1
                accelerator.print(f"update {update}: {loss.item():.4f}, lr {schedule.get_last_lr()[0]:.6f}", flush=True)
                if update % EVERY == 0:
                    checkpoint(accelerator, args.out, update)

    if accelerator.is_main_process and os.environ.get("FINAL"):
        torch.save(accelerator.unwrap_model(model).state_dict(), os.environ["FINAL"])
    accelerator.end_training()


main()
