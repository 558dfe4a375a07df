"""Next-event prediction from a stream (IterableDataset) that knows its place; Accelerate, an averaged copy."""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

KINDS, LENGTH = 20, 8


class Events(IterableDataset):
    """Each rank reads every n-th session of a pass; the passes are ordered differently."""

    def __init__(self, rank, world, sessions=240, passes=2):
        self.rank, self.world, self.sessions, self.passes = rank, world, sessions, passes
        self.skip = 0

    def __iter__(self):
        place = self.rank + self.skip * self.world
        while place < self.passes * self.sessions:
            this_pass, i = divmod(place, self.sessions)
            order = torch.randperm(self.sessions, generator=torch.Generator().manual_seed(this_pass))
            g = torch.Generator().manual_seed(10_000 + int(order[i]))
            yield torch.randint(0, 3, (LENGTH + 1,), generator=g).cumsum(0) % KINDS
            place += self.world


class ResumableLoader:
    """Counts the batches that it has handed out, and starts after them."""

    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size, self.batches = dataset, batch_size, 0

    def __iter__(self):
        self.dataset.skip = self.batches * self.batch_size
        for batch in DataLoader(self.dataset, self.batch_size, num_workers=1):
            self.batches += 1
            yield batch

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class NextEvent(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.gru = nn.Embedding(KINDS, dim), nn.GRU(dim, KINDS, batch_first=True)

    def forward(self, events):
        return 4 * self.gru(self.embed(events))[0]


def main(out, every=4):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(4)
    net = NextEvent()
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    loader = ResumableLoader(Events(accelerator.process_index, accelerator.num_processes), batch_size=10)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, momentum=0.5)
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.register_for_checkpointing(ema, loader)

    newest = [None]
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        newest = [max(out.glob("b*"), key=lambda path: int(path.name[1:]), default=None)]
    broadcast_object_list(newest)
    if newest[0]:
        accelerator.load_state(str(newest[0]))

    for events in loader:
        loss = F.cross_entropy(model(events[:, :-1]).flatten(0, 1), events[:, 1:].flatten())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        ema.update_parameters(net)
        accelerator.print(f"batch {loader.batches} loss {loss.item():.4f}", flush=True)
        if loader.batches % every == 0:
            accelerator.save_state(str(out / ".part"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (out / ".part").rename(out / f"b{loader.batches}")
    if accelerator.is_main_process and "FINAL" in os.environ:
        torch.save({"net": net.state_dict(), "ema": ema.state_dict()}, os.environ["FINAL"])
    accelerator.end_training()


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
main(parser.parse_args().out)
