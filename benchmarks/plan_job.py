"""The jobs of plan_check.py: python benchmarks/plan_job.py mlp | gpt | convnet | probe [memory]."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

SMALL, LARGE = 8, 8 * 2**20  # elements of fp32


class GPT(nn.Module):
    """Pre-norm blocks with a causal mask."""

    def __init__(self, width: int = 256, layers: int = 6, vocabulary: int = 2048) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


class ConvNet(nn.Module):
    """Residual blocks with batch norm."""

    def __init__(self, width: int = 96, blocks: int = 5) -> None:
        super().__init__()
        self.into, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 100)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.into(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def probe() -> None:
    """Rank 0 prints the seconds of an all-reduce: the median of nine, of a small and of a large tensor."""
    run = paceline.start(strategy="ddp:reducer=native", device="cpu", progress="off")
    found = {"large_bytes": 4 * LARGE}
    for name, count in (("small", SMALL), ("large", LARGE)):
        tensor, times = torch.zeros(count), []
        for _ in range(10):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        found[f"{name}_seconds"] = sorted(times[1:])[4]
    run.print(json.dumps(found))


def peak_of_a_step(model: nn.Module, optimizer: Any, step: Callable[[], None]) -> int:
    """The most bytes in tensors during the fourth step. DDP's buckets are not seen: C++ makes them."""
    for _ in range(3):
        step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    devices = tracker.get_tracker_snapshot("peak").values()
    return int(max(sum(size for kind, size in kinds.items() if kind == "Total") for kinds in devices))


def job(name: str) -> tuple[nn.Module, Callable[..., torch.optim.Optimizer], TensorDataset, int]:
    """A model, its optimizer's constructor, its data and the global batch."""
    generator = torch.Generator().manual_seed(0)
    if name == "mlp":
        model: nn.Module = nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 10)
        )
        data = TensorDataset(
            torch.randn(512, 1024, generator=generator), torch.randint(10, (512,), generator=generator)
        )
        batch = 64
    elif name == "convnet":
        model = ConvNet()
        data = TensorDataset(
            torch.randn(128, 3, 16, 16, generator=generator), torch.randint(100, (128,), generator=generator)
        )
        batch = 16
    else:
        model = GPT()
        tokens = torch.randint(2048, (64, 65), generator=generator)
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        batch = 8
    if name == "convnet":
        return model, partial(torch.optim.SGD, lr=1e-4, momentum=0.9), data, batch
    return model, partial(torch.optim.AdamW, lr=1e-4), data, batch


def train(name: str, memory: bool = False) -> None:
    run = paceline.start(seed=0, progress="off")
    model, make, data, batch = job(name)
    model, optimizer = run.prepare(model, make(model.parameters()))
    loader = run.loader(data, global_batch=batch)

    def update(x: Tensor, y: Tensor) -> None:
        run.backward(F.cross_entropy(model(x).flatten(0, -2), y.flatten()))
        run.step(optimizer)

    if memory:
        batches = iter(loader)
        run.print(json.dumps(run.gather([peak_of_a_step(model, optimizer, lambda: update(*next(batches)))])))
        return
    for _ in run.epochs(1000):
        for x, y in loader:
            update(x, y)


if __name__ == "__main__":
    probe() if sys.argv[1] == "probe" else train(sys.argv[1], "memory" in sys.argv[2:])
