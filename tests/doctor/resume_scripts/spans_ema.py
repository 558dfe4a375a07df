"""Token tags with BERT and transformers.Trainer: an averaged copy in a callback, own optimizer, loader workers."""

import argparse
import os
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainerCallback, TrainingArguments, set_seed


class Spans(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        ids = torch.randint(2, 70, (14,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": (ids % 7 == 0).long() + (ids.roll(1) % 7 == 0).long()}


class Averaging(TrainerCallback):
    """Keeps the averaged weights beside each checkpoint of the Trainer."""

    FILE = "averaged.pt"

    def __init__(self, model, decay):
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.averaged.load_state_dict(torch.load(self.path(args, state)))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.averaged.update_parameters(getattr(model, "module", model))

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            path = self.path(args, state)
            torch.save(self.averaged.state_dict(), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)

    def path(self, args, state):
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / self.FILE


def newest(out):
    whole = [path.parent for path in Path(out).glob(f"checkpoint-*/{Averaging.FILE}")]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    set_seed(19)
    config = BertConfig(
        vocab_size=70,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        num_labels=3,
    )
    model = BertForTokenClassification(config)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.NAdam([{"params": matrices, "weight_decay": 0.01}, {"params": vectors}], lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=26)
    averaging = Averaging(model, 0.9)
    training = TrainingArguments(
        args.out,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=1,
        save_steps=4,
        logging_steps=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=19,
    )
    trainer = Trainer(
        model, training, train_dataset=Spans(208), optimizers=(optimizer, schedule), callbacks=[averaging]
    )
    last = newest(args.out)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    if trainer.is_world_process_zero() and os.environ.get("FINAL"):
        parts = {"model": model.state_dict(), "averaged": averaging.averaged.state_dict()}
        torch.save(parts, os.environ["FINAL"])


if __name__ == "__main__":
    main()
