"""How much accuracy a larger batch costs on scikit-learn's digits, and how much scaling and warm-up recover.

    python benchmarks/batch_size.py                 # the table of docs/learning_rate.md; about five minutes on one core
    python benchmarks/batch_size.py --seeds 1 --batches 32 1024

Each row is a batch size, each column a rule for the learning rate. A cell shows the median test accuracy over the
seeds, and the range. The first table has equal epochs, the second equal steps.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

BASE_BATCH, EPOCHS, WARMUP_EPOCHS, TEST_EXAMPLES = 32, 20, 5, 297
RULES: dict[str, tuple[str | None, bool]] = {  # name -> (rule of scale_lr, warm-up)
    "fixed": (None, False),
    "sqrt": ("sqrt", False),
    "sqrt, warm-up": ("sqrt", True),
    "linear": ("linear", False),
    "linear, warm-up": ("linear", True),
}


def digits() -> tuple[TensorDataset, TensorDataset]:
    source = load_digits()
    images = torch.tensor(source["data"], dtype=torch.float32) / 16
    labels = torch.tensor(source["target"], dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-TEST_EXAMPLES], order[-TEST_EXAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 10))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def correct(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return outputs.argmax(1) == batch[1]


@functools.cache
def accuracy(
    data: tuple[TensorDataset, TensorDataset], batch: int, rule: str, seed: int, same_steps: bool, base_lr: float
) -> float:
    """Test accuracy after one training."""
    train, test = data
    scaling, warm = RULES[rule]
    run = paceline.start(seed=seed, device="cpu", progress="off", nonfinite="skip")
    model = network()
    lr = base_lr if scaling is None else paceline.scale_lr(base_lr, BASE_BATCH, batch, scaling)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    steps = -(-len(train) // batch)  # in an epoch
    epochs = EPOCHS if not same_steps else -(-EPOCHS * -(-len(train) // BASE_BATCH) // steps)
    schedule: Any = None
    if warm:
        schedule = paceline.warmup(optimizer, epochs * steps * WARMUP_EPOCHS // EPOCHS, start=base_lr / lr)
    paceline.fit(
        model, loss_fn, train, optimizer=optimizer, global_batch=batch, epochs=epochs, scheduler=schedule, run=run
    )
    score = paceline.evaluate(model, loss_fn, test, global_batch=512, metrics={"accuracy": correct}, run=run)
    run.close()
    return score["accuracy"]


def table(title: str, batches: list[int], rules: Sequence[str], cell: Callable[[int, str], str]) -> None:
    print(f"\n{title}\n")
    print("| batch | " + " | ".join(rules) + " |")
    print("|---" * (len(rules) + 1) + "|")
    for batch in batches:
        print(f"| {batch} | " + " | ".join(cell(batch, rule) for rule in rules) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128, 512, 1024])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01, help=f"the learning rate of a batch of {BASE_BATCH}")
    options = parser.parse_args()
    data, began = digits(), time.perf_counter()
    for same_steps, rules in ((False, tuple(RULES)), (True, ("fixed", "linear, warm-up"))):

        def cell(batch: int, rule: str, same_steps: bool = same_steps) -> str:
            base = batch == BASE_BATCH  # then all rules are the same training
            which = ("fixed", False) if base else (rule, same_steps)
            found = [accuracy(data, batch, which[0], seed, which[1], options.lr) for seed in range(options.seeds)]
            return f"{statistics.median(found):.1%} ({max(found) - min(found):.1%})"

        steps = EPOCHS * -(-len(data[0]) // BASE_BATCH)
        table(f"{steps} steps each" if same_steps else f"{EPOCHS} epochs each", options.batches, rules, cell)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
