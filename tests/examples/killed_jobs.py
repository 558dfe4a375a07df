"""What test_resumed_finetuning.py starts by `paceline run`, in float64:

    killed_jobs.py WHAT RANK:STEP FOLDER CHECKPOINTS SAVED

WHAT: "example" is examples/finetune_lora.py; "fit" is paceline.fit as users of Hugging Face's Trainer would call it: a
model with adapters that computes its own loss, a Dataset with a column of text, a collator that pads dicts. Rank RANK
kills itself after STEP updates of the run; "-": nobody does. Weights are left in SAVED.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import paceline

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS, BATCH, EVERY = 3, 7, 3  # an epoch is 4 steps


def kill(rank: int, step: int) -> None:
    own = paceline.Run.step

    def stepped(run: paceline.Run, *args: Any, **named: Any) -> bool:
        done = own(run, *args, **named)
        if done and run.steps == step and run.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    paceline.Run.step = stepped  # type: ignore[method-assign]


def example(folder: Path, checkpoints: str, saved: str) -> None:
    data = ["--data", str(folder / "text.txt"), "--model", str(folder / "bert"), "--classes", "3"]
    sizes = ["--epochs", str(EPOCHS), "--global-batch", str(BATCH), "--lr", "1e-2"]
    sys.argv = ["finetune_lora.py", *data, *sizes, "--checkpoints", checkpoints, "--save", saved]
    runpy.run_path(str(EXAMPLES / "finetune_lora.py"), run_name="__main__")


def fit(folder: Path, checkpoints: str, saved: str) -> None:
    from finetune_lora import labelled
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    run = paceline.start(noise="example")
    _, train, test = labelled(folder / "text.txt", 3)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    train, test = (data.map(lambda rows: tokenizer(rows["text"]), batched=True) for data in (train, test))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert", num_labels=3)
    lora: dict[str, Any] = {"target_modules": ["query", "value"], "lora_dropout": 0.1}
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, **lora))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    history = paceline.fit(
        model,
        None,
        train,
        optimizer=optimizer,
        global_batch=BATCH,
        epochs=EPOCHS,
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12),
        collate_fn=DataCollatorWithPadding(tokenizer),
        evaluate_on=test,
        checkpoints=paceline.Checkpoints(checkpoints, every=EVERY),
        run=run,
    )
    run.export(Path(saved) / "whole" / "model.safetensors")
    run.print("losses", " ".join(value.hex() for value in [*history["loss"], *history["val_loss"]]))


if __name__ == "__main__":
    what, at, *rest = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    torch.set_default_dtype(torch.float64)
    if at != "-":
        rank, step = map(int, at.split(":"))
        kill(rank, step)
    {"example": example, "fit": fit}[what](Path(rest[0]), *rest[1:])
