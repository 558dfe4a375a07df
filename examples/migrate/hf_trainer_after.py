"""hf_trainer_before.py with Paceline. paceline run --nproc 2 examples/migrate/hf_trainer_after.py"""

from typing import Any

import torch
from job import options
from pixels import Sentences, bert
from torch import Tensor
from transformers import get_linear_schedule_with_warmup

import paceline


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """As the Trainer: no decay on biases and norms."""
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[not (name.endswith("bias") or "LayerNorm" in name)].append(parameter)
    return [{"params": parts[True], "weight_decay": 0.1}, {"params": parts[False], "weight_decay": 0.0}]


def main() -> None:
    args = options(batch=60)  # of all processes together
    train_set, test_set = Sentences(train=True), Sentences(train=False)
    run = paceline.start(seed=0)
    train_loader = run.loader(train_set, global_batch=args.batch, shuffle=True)

    model = bert()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=5e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, args.epochs * train_loader.steps)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)

    for _ in run.epochs(args.epochs):
        for batch in train_loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=1.0)
    right = run.predict(model, test_set, global_batch=256, fn=lambda model, batch: (
        model(**batch).logits.argmax(1) == batch["labels"]
    ))  # fmt: skip
    run.print(f"test accuracy {right.double().mean():.4f}")
    if run.main:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
