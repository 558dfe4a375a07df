"""BERT or ALBERT, trained to fill in masked words, with Hugging Face's models, tokenizers, data sets and collator.

    python examples/wikitext.py --data wikitext-2/ --save models/bert            # or a real checkpoint
    python examples/bert_mlm.py --data wikitext-2/ --model models/bert --save models/bert-wikitext
    paceline run --nproc 2 examples/bert_mlm.py --data wikitext-2/ --model models/bert --save models/bert-wikitext

With noise="example" each example has the same masked words and the same dropout on any number of processes. The number
of masked words differs between processes, so the mean of the processes' `model(**batch).loss` is not the loss of the
global batch. So loss_fn returns the sum and the count; their quotient over all processes is exact.
"""

from __future__ import annotations

import argparse
import math
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, get_linear_schedule_with_warmup
from wikitext import DataError, load, paragraphs

import paceline

NOT_MASKED = -100  # the label of a word that was not masked


def blocks(texts: list[str], tokenizer: Any, length: int) -> Dataset:
    """Concatenate the texts, and split them into pieces of `length` tokens. Drops the remainder."""

    def cut(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        whole = {name: list(chain.from_iterable(lists)) for name, lists in rows.items()}
        end = len(whole["input_ids"]) // length * length
        return {name: [ids[n : n + length] for n in range(0, end, length)] for name, ids in whole.items()}

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], return_special_tokens_mask=True, verbose=False)

    data = Dataset.from_dict({"text": texts}).map(tokenize, batched=True, remove_columns=["text"])
    return data.map(cut, batched=True, batch_size=len(data))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """No weight decay for biases and layer norm weights, which are vectors."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is whole] for whole in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def loss_fn(model: nn.Module, batch: Any) -> paceline.Total:
    labels = batch.pop("labels")
    logits = model(**batch).logits
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_MASKED, reduction="sum")
    return paceline.Total(total, (labels != NOT_MASKED).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a masked language model.")
    parser.add_argument("--data", type=Path, default="data/wikitext-2", help="a text, or a folder of them")
    parser.add_argument("--model", default="models/bert", help="a folder with a model and its tokenizer")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=16, help="blocks per step, over all processes")
    parser.add_argument("--micro-batch", type=int, help="blocks that one process computes at once (default: all)")
    parser.add_argument("--length", type=int, default=64, help="tokens in a block")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=200, help="evaluate every so many steps")
    parser.add_argument("--save", type=Path, help="save model and tokenizer in this folder, for from_pretrained")
    options = parser.parse_args()

    run = paceline.start(seed=0, noise="example")
    try:
        texts = [text for _, text in paragraphs(options.data)]
        model, tokenizer = load(AutoModelForMaskedLM, options.model)
    except DataError as error:
        parser.error(str(error))
    with run.main_first():  # rank 0 tokenizes; the others read its cache
        data = blocks(texts, tokenizer, options.length)
    held_out = max(len(data) // 10, 1)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    sizes: dict[str, Any] = {"global_batch": options.global_batch, "collate_fn": collator}
    train = run.loader(data.select(range(len(data) - held_out)), **sizes, micro_batch=options.micro_batch, shuffle=True)
    test = run.loader(data.select(range(len(data) - held_out, len(data))), **sizes, train=False)

    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=options.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)

    @torch.no_grad()
    def perplexity() -> float:
        model.eval()
        losses = [loss_fn(model, batch) for batch in test]
        model.train()
        return math.exp(run.ratio(sum(one.sum for one in losses), sum(one.count for one in losses)))

    model.train()  # from_pretrained returns a model in evaluation mode
    run.print(f"step 0: held-out perplexity {perplexity():.1f}")
    for _ in run.epochs(math.ceil(options.steps / train.steps)):
        for batch in train:
            if run.steps >= options.steps:
                break
            run.forward_backward(loss_fn, model, batch)
            if not run.step(optimizer, max_grad_norm=1.0) or (run.steps % options.every and run.steps < options.steps):
                continue
            run.print(f"step {run.steps}: held-out perplexity {perplexity():.1f}")

    if options.save:
        run.export(options.save / "model.safetensors")
        if run.main:
            model.config.save_pretrained(options.save)
            tokenizer.save_pretrained(options.save)
            again, _ = load(AutoModelForMaskedLM, str(options.save))
            run.print(f"{options.save}: a {type(again).__name__} of {again.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
