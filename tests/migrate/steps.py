"""How many examples an optimizer step sees, counted under each tool on two processes.

    torchrun --nproc-per-node 2 tests/migrate/steps.py FOLDER

130 examples, batch_size 8 (what docs/migrate/batch.md shows). Writes FOLDER/steps.RANK.json: tool -> examples of each
step of one epoch on this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXAMPLES, BATCH, ACCUMULATION = 130, 8, 4


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(EXAMPLES, 4, generator=draw), torch.randint(3, (EXAMPLES,), generator=draw))


def pieces(batch: int = BATCH, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(dataset(), batch_size=batch, **options)


def ddp(accumulation: int = 1) -> None:
    net, optimizer, loader = pieces(sampler=DistributedSampler(dataset()))
    model = DistributedDataParallel(net)
    for number, (x, y) in enumerate(loader, 1):
        model.require_backward_grad_sync = last = number % accumulation == 0 or number == len(loader)
        (F.cross_entropy(model(x), y) / accumulation).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def data_parallel() -> None:
    net, optimizer, loader = pieces()
    model = nn.DataParallel(net)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def accelerate(split: bool = False, accumulation: int = 1) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
        gradient_accumulation_steps=accumulation,
    )
    model, optimizer, loader = accelerator.prepare(*pieces())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()


def fabric() -> None:
    from lightning.fabric import Fabric

    tool = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    tool.launch()
    net, inner, plain = pieces()
    model, optimizer = tool.setup(net, inner)
    for x, y in tool.setup_dataloaders(plain):
        tool.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def trainer(accumulation: int = 1) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=accumulation, **quiet
    ).fit(Module(), pieces()[2])


def hf_trainer(accumulation: int = 1) -> None:
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(inputs), labels)}

    rows = [{"inputs": x, "labels": y} for x, y in dataset()]
    settings = TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulation,
        num_train_epochs=1, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    Trainer(Net(), settings, train_dataset=rows).train()  # type: ignore[arg-type]


TOOLS: dict[str, Callable[[], None]] = {
    "ddp": ddp,
    "ddp, 4 accumulated": lambda: ddp(ACCUMULATION),
    "data_parallel": data_parallel,
    "accelerate": accelerate,
    "accelerate, split_batches": lambda: accelerate(split=True),
    "accelerate, 4 accumulated": lambda: accelerate(accumulation=ACCUMULATION),
    "hf_trainer": hf_trainer,
    "hf_trainer, 4 accumulated": lambda: hf_trainer(ACCUMULATION),
    "fabric": fabric,
    "lightning": trainer,
    "lightning, 4 accumulated": lambda: trainer(ACCUMULATION),
}


def ours() -> dict[str, list[int]]:
    """Under Paceline, on the ranks of this process group: examples of each step on this process."""
    import paceline

    found = {}
    for name, options in {"paceline": {}, "paceline, micro_batch": {"micro_batch": 2}}.items():
        run = paceline.start(progress="off", device="cpu")
        model, optimizer, _ = pieces()
        run.prepare(model, optimizer)
        steps, seen = [], 0
        loader = run.loader(dataset(), global_batch=16, shuffle=True, **options)  # type: ignore[arg-type]
        for x, y in loader:
            seen += len(y)
            run.backward(F.cross_entropy(model(x), y))
            if run.step(optimizer):
                steps.append(seen)
                seen = 0
        found[name] = steps
        run.close()
    return found


def main() -> None:
    from theirs import Counts  # beside this script

    counts = Counts()
    counts.install()
    torch.distributed.init_process_group("gloo")
    found = {}
    for name, tool in TOOLS.items():
        counts.steps, counts.open = [], 0
        tool()
        found[name] = counts.steps
    Path(sys.argv[1], f"steps.{os.environ['RANK']}.json").write_text(json.dumps(found))
    # none of the tools ends it, and gloo's threads, when the interpreter exits under them, sometimes abort the process
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
