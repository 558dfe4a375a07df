"""transformers.Trainer on a data set that is a stream."""

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class D(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        for _ in range(300):
            x = torch.randint(0, 60, (12,), generator=g)
            yield {"input_ids": x, "labels": x}


class E(Dataset):
    def __init__(self):
        self.x = torch.randint(0, 60, (21, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return 21

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


set_seed(3)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16))
args = TrainingArguments(
    "out",
    max_steps=12,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    logging_steps=3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
t = Trainer(model, args, train_dataset=D(), eval_dataset=E())
t.train()
