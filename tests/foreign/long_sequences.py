"""Hugging Face's decoders and encoders on padded and packed sequences, trained under `ulysses` on the ranks of this
process group and, over the whole global batch, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.foreign.models import BATCH, EPOCHS, VOCABULARY, N, apart, bert, gpt2, make, started, whole
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import paceline

LENGTH = 13  # not a multiple of 2 or 4


class Padded(Dataset[Any]):
    """Sequences of several lengths, padded on the right, with a mask. Labels are ids, and -100 where padded."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(4)
        self.ids = torch.randint(5, VOCABULARY, (N, LENGTH), generator=g)
        self.lengths = torch.randint(3, LENGTH + 1, (N,), generator=g)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        mask = torch.arange(LENGTH) < self.lengths[i]
        ids = torch.where(mask, self.ids[i], 0)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


class Packed(Padded):
    """Several texts in each row: positions restart, and attention stays within a text."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        first = int(self.lengths[i])
        positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        labels = torch.where(positions == 0, -100, self.ids[i])  # no text predicts the first word of the next one
        return {"input_ids": self.ids[i], "position_ids": positions, "labels": labels}


def llama(**more: Any) -> nn.Module:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **{**sizes, **heads, **more}))
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):  # it computes in float32, torch's in float64
                setattr(module, name, nn.RMSNorm(child.weight.shape, child.variance_epsilon))
    return model


def in_model(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The model shifts the labels, and divides by the number of labels."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return paceline.Total(model(**batch).loss * count, count)


def masked(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    count = (batch["labels"] != -100).sum()
    return paceline.Total(model(**batch).loss * count, count)


def outside(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The script shifts the labels. In float64: Hugging Face's own loss converts to float32."""
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1]
    count = (labels != -100).sum()
    return paceline.Total(F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * count, count)


JOBS: dict[str, tuple[Callable[..., nn.Module], Any, Callable[[], Padded]]] = {
    "llama": (llama, outside, Padded),
    "llama_packed": (llama, outside, Packed),
    "llama_in_model": (llama, in_model, Packed),
    "llama_eager": (partial(llama, attn_implementation="eager"), outside, Padded),
    "llama_one_key_head": (partial(llama, num_key_value_heads=1), outside, Packed),
    "llama_3_heads": (partial(llama, hidden_size=24, num_attention_heads=3, num_key_value_heads=1), outside, Packed),
    "llama_checkpointing": (llama, outside, Padded),
    "bert": (bert, masked, Padded),
    "bert_eager": (partial(bert, attn_implementation="eager"), masked, Padded),
    "gpt2": (gpt2, in_model, Padded),
}


def prepared(job: str, adam: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(JOBS[job][0], adam)
    model.train()
    if job == "llama_checkpointing":
        model.gradient_checkpointing_enable()
    return model, optimizer


def plainly(job: str, adam: bool) -> nn.Module:
    _, loss_fn, data_set = JOBS[job]
    model, optimizer = prepared(job, adam)
    data = data_set()
    for _ in range(EPOCHS):
        for start in range(0, N, BATCH):
            rows = [data[i] for i in range(start, min(start + BATCH, N))]
            loss = loss_fn(model, {name: torch.stack([row[name] for row in rows]) for name in rows[0]})
            optimizer.zero_grad()
            (loss.sum / loss.count).backward()
            optimizer.step()
    return model


def trained(job: str, strategy: str, optimizer: str, micro: str = "0", form: str = "loop") -> float:
    """How far the weights are from plain PyTorch's."""
    _, loss_fn, data_set = JOBS[job]
    adam = optimizer == "adam"
    with started(strategy=strategy or None) as run:
        model, own = run.prepare(*prepared(job, adam))
        loader = run.loader(data_set(), global_batch=BATCH, micro_batch=int(micro) or None)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                if form == "loop":
                    loss = loss_fn(model, batch)
                    run.backward(loss.sum / loss.count, count=loss.count)
                else:
                    run.forward_backward(loss_fn, model, batch)
                run.step(own)
        ours = whole(run)
    return apart(ours, plainly(job, adam))


def all_trained(jobs: str, *options: str) -> dict[str, float]:
    return {job: trained(job, *options) for job in jobs.split()}
