"""transformers.Trainer with a training loader of its own, which returns a plain DataLoader."""

import tempfile

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, n=128):
        self.ids = torch.randint(0, 40, (n, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class MyTrainer(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, shuffle=True)  # fault


def main():
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    MyTrainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
