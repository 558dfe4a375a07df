"""The BERT job on the ranks of this process group: its masks, and how far its weights are from plain PyTorch's."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from tests.foreign.functions import SEED, started
from tests.foreign.scripts.bert_tokens import Sentences, make_model, make_tokenizer, masked_loss
from transformers import DataCollatorForLanguageModeling

from paceline.data.batch_plan import one_shard
from paceline.data.loader import Loader
from paceline.data.sources import LoaderArguments, make_source

EPOCHS, BATCH = 2, 8
ZERO_GRADIENT = "attention.self.key.bias"
"""Its gradient is zero but for rounding, which Adam makes whole steps of: in plain PyTorch too."""


class Recording:
    """Hugging Face's collator, with what it made of each example."""

    def __init__(self, seed: int | None) -> None:
        self.tokenizer = make_tokenizer()
        self.collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=0.3, seed=seed)

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        return self.collator(examples)


def masks_of(loader: Loader, batch: Any) -> dict[str, Any]:
    """(epoch, example) -> its inputs and labels, without padding."""
    found = {}
    for row, index in enumerate(loader.indices):
        length = int(batch["attention_mask"][row].sum())
        its = [batch["input_ids"][row][:length].tolist(), batch["labels"][row][:length].tolist()]
        found[f"{loader.epoch}, {index}"] = its
    return found


def whole(collate: Any, dataset: Any) -> Loader:
    given = LoaderArguments(global_batch=BATCH, shuffle=True, options={"collate_fn": collate})
    source = make_source(dataset, given, seed=SEED, plan=partial(one_shard, 1, 0))
    return Loader(source, device=torch.device("cpu"), on_yield=lambda _: None)


def trained(strategy: str | None, micro_batch: str, seed: str = "") -> dict[str, Any]:
    """ "distance": of the weights from a plain loop's over the same masked batches; "masks": of this process."""
    with started(strategy=strategy or None) as run:
        collate = Recording(int(seed) if seed else None)
        dataset = Sentences(collate.tokenizer)
        model = make_model(len(collate.tokenizer))
        original = copy.deepcopy(model)

        optimizer = torch.optim.AdamW(original.parameters(), lr=1e-3)
        plain = whole(Recording(int(seed) if seed else None), dataset)
        for _ in range(EPOCHS):
            for batch in plain:
                loss = original(**batch).loss  # one process, the whole global batch: transformers' own mean
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        options: dict[str, Any] = {"micro_batch": int(micro_batch) or None, "collate_fn": collate}
        loader = run.loader(dataset, global_batch=BATCH, shuffle=True, **options)
        masks: dict[str, Any] = {}
        for _ in range(EPOCHS):
            for batch in loader:
                if not hasattr(batch, "pieces"):
                    masks |= masks_of(loader, batch)
                run.forward_backward(masked_loss, model, batch)
                run.step(optimizer)
        state = run._strategy.state_dict()["models"][0]
        if run.main:
            names = [name for name, _ in original.named_parameters() if ZERO_GRADIENT not in name]
            own = dict(original.named_parameters())
            apart = sum((state[name] - own[name]).square().sum().item() for name in names)
            size = sum(own[name].square().sum().item() for name in names)
            return {"distance": math.sqrt(apart / size), "masks": masks, "steps": run.steps}
        return {"distance": 0.0, "masks": masks, "steps": run.steps}
