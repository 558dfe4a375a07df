"""A denoiser of short signals with Accelerate; an exponential moving average of its weights is what gets used."""

import argparse
import copy
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class EMA:
    """shadow = decay * shadow + (1 - decay) * weights, after each update."""

    def __init__(self, model, decay=0.9):
        self.decay, self.model = decay, copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for shadow, weight in zip(self.model.parameters(), model.parameters()):
            shadow.lerp_(weight, 1 - self.decay)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


class EpochOrder(Sampler):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(500 + self.epoch)).tolist()

    def __len__(self):
        return self.size


class Count:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(out: Path, epochs=2, every=4):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 24))
    ema = EMA(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    t, number = torch.linspace(0, 6.28, 24), torch.arange(192)[:, None]
    data = TensorDataset(torch.sin(t * (0.5 + number / 80) + number))
    loader = DataLoader(data, batch_size=8, sampler=EpochOrder(len(data)))
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    count = Count()
    accelerator.register_for_checkpointing(count)
    out.mkdir(parents=True, exist_ok=True)
    saved = sorted(out.glob("at-*"), key=lambda folder: int(folder.name[3:]))
    if saved:
        accelerator.load_state(str(saved[-1]))

    while count.step < epochs * len(loader):
        epoch, done = divmod(count.step, len(loader))
        loader.set_epoch(epoch)
        for (clean,) in accelerator.skip_first_batches(loader, done):
            g = torch.Generator().manual_seed(count.step * 100 + accelerator.process_index)
            noisy = clean + 0.3 * torch.randn(clean.shape, generator=g)
            loss = (model(noisy) - clean).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(net)
            count.step += 1
            accelerator.print(f"{count.step:3d} {loss.item():.5f}", flush=True)
            if count.step % every == 0:
                accelerator.save_state(str(out / ".half-done"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    os.replace(out / ".half-done", out / f"at-{count.step}")
                accelerator.wait_for_everyone()
    if accelerator.is_main_process and "FINAL" in os.environ:
        torch.save({"net": net.state_dict(), "ema": ema.state_dict()}, os.environ["FINAL"])
    accelerator.end_training()


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
main(parser.parse_args().out)
