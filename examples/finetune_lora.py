"""Fine-tune a BERT or ALBERT with LoRA (Hugging Face's PEFT) to predict the article of a paragraph.

    python examples/finetune_lora.py --data wikitext-2/ --model models/bert-wikitext --save models/articles
    paceline run --nproc 2 --strategy fsdp examples/finetune_lora.py --data wikitext-2/ --model models/bert-wikitext

The model comes from bert_mlm.py, or from any checkpoint. Only the new classifier and LoRA's small matrices are trained
and saved; the rest is frozen. Batches are the dictionaries of `datasets`, padded to their longest paragraph. The model
computes a mean over examples as its loss, so loss_fn just returns it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding
from wikitext import DataError, load, paragraphs

import paceline

LONGEST = 128  # tokens of a paragraph
NEW = ["pooler", "classifier"]  # not in a masked language model, so they are trained from scratch and saved whole


def labelled(data: Path, classes: int) -> tuple[list[str], Dataset, Dataset]:
    """The titles of the longest articles, and their paragraphs: every fifth to test, the others to train."""
    found = [(title, text) for title, text in paragraphs(data) if title and "<unk>" not in title and len(text) > 100]
    titles = [title for title, _ in Counter(title for title, _ in found).most_common(classes)]
    if len(titles) < 2:
        raise DataError(f"--classes {classes}, and {len(titles)} of the articles of {data} can be taken: two or more "
                        "are needed. A title looks so: = Manila =")  # fmt: skip
    rows = [{"text": text, "label": titles.index(title)} for title, text in found if title in titles]
    return titles, Dataset.from_list([row for n, row in enumerate(rows) if n % 5]), Dataset.from_list(rows[::5])


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a classifier of paragraphs with LoRA.")
    parser.add_argument("--data", type=Path, default="data/wikitext-2", help="a file of WikiText, or a folder of them")
    parser.add_argument("--model", default="models/bert", help="a folder with a model and its tokenizer")
    parser.add_argument("--classes", type=int, default=20, help="number of articles to distinguish")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=32, help="paragraphs per step, over all processes")
    parser.add_argument("--micro-batch", type=int, help="paragraphs that one process computes at once (default: all)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoints", type=Path, help="a folder: resume from its newest checkpoint, and save there")
    parser.add_argument("--save", type=Path, help="save the adapter in this folder")
    options = parser.parse_args()

    run = paceline.start(seed=0, noise="example")
    try:
        titles, train_set, test_set = labelled(options.data, options.classes)
        head: dict[str, Any] = {"num_labels": len(titles), "id2label": dict(enumerate(titles))}
        model, tokenizer = load(AutoModelForSequenceClassification, options.model, **head)
    except DataError as error:
        parser.error(str(error))

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], truncation=True, max_length=LONGEST)

    how: dict[str, Any] = {"batched": True, "remove_columns": ["text"]}
    with run.main_first():  # rank 0 tokenizes; the others read its cache
        train_set, test_set = (data.map(tokenize, **how).with_format("torch") for data in (train_set, test_set))
    sizes: dict[str, Any] = {"global_batch": options.global_batch, "collate_fn": DataCollatorWithPadding(tokenizer)}
    train = run.loader(train_set, **sizes, micro_batch=options.micro_batch, shuffle=True)
    test = run.loader(test_set, **sizes, train=False)

    lora: dict[str, Any] = {"target_modules": ["query", "value"], "modules_to_save": NEW, "lora_dropout": 0.1}
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, **lora))
    run.print("{:,} of {:,} parameters are trained".format(*model.get_nb_trainable_parameters()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    model, optimizer = run.prepare(model, optimizer)
    if options.checkpoints and run.restore(options.checkpoints, missing_ok=True):
        run.print(f"resumed after step {run.steps}")

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        right = seen = 0
        for batch in test:
            labels = batch.pop("labels")
            right += int((model(**batch).logits.argmax(1) == labels).sum())
            seen += len(labels)
        model.train()
        return run.ratio(right, seen)

    model.train()
    for epoch in run.epochs(options.epochs):
        for batch in train:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=1.0)
        run.print(f"epoch {epoch + 1:2}  test accuracy {accuracy():.4f}")
        if options.checkpoints:
            run.save(options.checkpoints, keep=2)

    if options.save:
        whole = options.save / "whole" / "model.safetensors"
        run.export(whole)  # including the frozen part, under every strategy
        if run.main:
            model.save_pretrained(options.save, state_dict=load_file(whole))  # only the adapter
            base, _ = load(AutoModelForSequenceClassification, options.model, **head)
            merged = PeftModel.from_pretrained(base, str(options.save)).merge_and_unload()
            merged.save_pretrained(options.save / "merged")  # a plain model, for from_pretrained
            tokenizer.save_pretrained(options.save / "merged")


if __name__ == "__main__":
    main()
