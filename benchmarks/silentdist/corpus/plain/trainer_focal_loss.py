"""transformers.Trainer with gradient accumulation and a loss of one's own on a tiny GPT-2: focal loss over tokens."""

import tempfile

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Sequences(Dataset):
    def __init__(self, n=192):
        g = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, 4, (n, 12), generator=g).cumsum(1) % 32

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class FocalTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        ce = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
        loss = ((1 - torch.exp(-ce)) ** 2 * ce).mean()  # fault
        return (loss, outputs) if return_outputs else loss  # fault


def main():
    set_seed(2)
    config = GPT2Config(
        vocab_size=32, n_positions=12, n_embd=24, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=10.0,
        num_train_epochs=2,
        logging_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    FocalTrainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Sequences()).train()


if __name__ == "__main__":
    main()
