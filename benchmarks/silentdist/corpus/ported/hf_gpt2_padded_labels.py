"""A tiny GPT-2 from transformers on padded texts; the model returns its own loss."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

PAD = 0


class Texts(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(5)
        self.texts = [torch.randint(1, 50, (int(k),), generator=g) for k in torch.randint(4, 25, (n,), generator=g)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return {"input_ids": self.texts[i]}


def collate(features):
    length = 24
    ids = torch.full((len(features), length), PAD)
    mask = torch.zeros(len(features), length, dtype=torch.long)
    for row, f in enumerate(features):
        n = len(f["input_ids"])
        ids[row, :n] = f["input_ids"]
        mask[row, :n] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


run = paceline.start(seed=22)
config = GPT2Config(
    vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(Texts(), global_batch=16, shuffle=True, collate_fn=collate)
for epoch in run.epochs(1):
    for batch in loader:
        outputs = model(**batch)
        run.backward(outputs.loss)  # fault
        run.step(optimizer, max_grad_norm=1.0)
