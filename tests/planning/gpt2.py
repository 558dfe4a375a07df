"""A script in the idiom of transformers: GPT-2 from its configuration, labels in the batch, the model's own loss."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import paceline

CONFIG = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 512}
LENGTH, GLOBAL_BATCH = 32, 8


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**CONFIG, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(512, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    run = paceline.start(seed=0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, 1000)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    loader = run.loader(Tokens(), global_batch=GLOBAL_BATCH)
    for _ in run.epochs(100):
        for batch in loader:
            outputs = model(**batch)
            run.backward(outputs.loss)
            run.step(optimizer, max_grad_norm=1.0)


if __name__ == "__main__":
    main()
