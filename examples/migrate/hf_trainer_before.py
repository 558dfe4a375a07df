"""Hugging Face's Trainer, on a small BERT that reads the 64 pixels of a digit as a sentence.

torchrun --nproc-per-node 2 examples/migrate/hf_trainer_before.py
"""

from typing import Any

import numpy as np
import torch
from job import options
from pixels import Sentences, bert
from transformers import Trainer, TrainingArguments


def metrics(predicted: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(predicted.predictions.argmax(1) == predicted.label_ids))}


def main() -> None:
    args = options(batch=30)  # of each process
    train_set, test_set = Sentences(train=True), Sentences(train=False)
    model = bert()
    model.accepts_loss_kwargs = False  # else the Trainer makes the loss num_processes times as large: see the page
    settings = TrainingArguments(
        output_dir=str(args.out), num_train_epochs=args.epochs, per_device_train_batch_size=args.batch,
        learning_rate=5e-4, weight_decay=0.1, warmup_steps=10, max_grad_norm=1.0, seed=0,
        train_sampling_strategy="random", use_cpu=not torch.cuda.is_available(),
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=train_set, eval_dataset=test_set, compute_metrics=metrics)
    trainer.train()
    score = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"test accuracy {score:.4f}")
    trainer.save_model(str(args.out))


if __name__ == "__main__":
    main()
