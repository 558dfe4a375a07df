"""Models that people bring, each with a loss in its users' idiom, trained under a strategy on the ranks of this process
group and, over the whole global batch, in plain PyTorch."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

import paceline

VOCABULARY, LENGTH, N, BATCH, EPOCHS = 96, 10, 20, 8, 2
ZERO_GRADIENT = ("key.bias",)
"""The key bias of attention: its gradient is zero but for rounding, which Adam makes whole steps of."""


class Sentences(Dataset[Any]):
    """Token ids of several lengths, padded, with a mask; a label for each token and one for each sentence."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        self.ids = torch.randint(5, VOCABULARY, (N, LENGTH), generator=g)
        self.lengths = torch.randint(4, LENGTH + 1, (N,), generator=g)
        self.classes = torch.randint(3, (N,), generator=g)
        self.chosen = torch.rand(N, LENGTH, generator=g) < 0.6

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        mask = torch.arange(LENGTH) < self.lengths[i]
        ids = torch.where(mask, self.ids[i], 0)
        labels = torch.where(mask & self.chosen[i], ids, -100)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels, "classes": self.classes[i]}


def bert(dropout: float = 0.0, **more: Any) -> nn.Module:
    return BertForMaskedLM(BertConfig(**_bert(dropout), **more))


def bert_classifier(dropout: float = 0.0, **more: Any) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_bert(dropout), num_labels=3, **more))


def _bert(dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def albert(dropout: float = 0.0, **more: Any) -> nn.Module:
    return AlbertForMaskedLM(AlbertConfig(**_bert(dropout), embedding_size=16, **more))


def gpt2(dropout: float = 0.0, **more: Any) -> nn.Module:
    config = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16, **more}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**config, **drops, bos_token_id=1, eos_token_id=2))


def masked_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    labels = batch["labels"]
    loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    count = (labels != -100).sum()
    return paceline.Total(loss * count, count)


def next_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The next token's cross-entropy, from `.logits`."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    total = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="sum")
    return paceline.Total(total, (labels != -100).sum())


def by_logits(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The loss outside of the model, from `.logits` of the object that it returns."""
    labels = batch["labels"]
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    keep = labels != -100
    return paceline.Total(F.cross_entropy(logits[keep], labels[keep], reduction="sum"), keep.sum())


def sentence_class(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The model's own mean over the examples."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["classes"]).loss


JOBS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module, Any], Any]]] = {
    "bert": (bert, masked_tokens),
    "bert_logits": (bert, by_logits),
    "bert_classifier": (bert_classifier, sentence_class),
    "albert": (albert, masked_tokens),
    "gpt2": (gpt2, next_tokens),
}


@contextlib.contextmanager
def started(**settings: Any) -> Iterator[paceline.Run]:
    run = paceline.start(seed=5, progress="off", device="cpu", **settings)
    try:
        yield run
    finally:
        run.close()


def make(build: Callable[..., nn.Module], adam: bool, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build(**more).double()
    if adam:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def plainly(build: Callable[..., nn.Module], loss_fn: Any, adam: bool, factor: float = 1.0, **more: Any) -> nn.Module:
    model, optimizer = make(build, adam, **more)
    data = Sentences()
    for _ in range(EPOCHS):
        for start in range(0, N, BATCH):
            rows = [data[i] for i in range(start, min(start + BATCH, N))]
            loss = loss_fn(model, {name: torch.stack([row[name] for row in rows]) for name in rows[0]})
            if isinstance(loss, paceline.Total):
                assert loss.count is not None
                loss = loss.sum / loss.count
            optimizer.zero_grad()
            (loss * factor).backward()
            optimizer.step()
    return model


def whole(run: paceline.Run) -> dict[str, Tensor]:
    """The weights of the run's model, as an export holds them."""
    name = [tempfile.mkdtemp() if run.main else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    path = Path(name[0]) / "model.safetensors"
    run.export(path)
    return load_file(path)


def apart(ours: dict[str, Tensor], plain: nn.Module) -> float:
    """The norm of the difference over that of the plain weights, without what has no gradient."""
    expected = {k: v for k, v in plain.named_parameters() if not k.endswith(ZERO_GRADIENT)}
    square = sum(float((_of(ours, k, plain) - v.detach()).square().sum()) for k, v in expected.items())
    return math.sqrt(square / sum(float(v.detach().square().sum()) for v in expected.values()))


def _of(ours: dict[str, Tensor], name: str, plain: nn.Module) -> Tensor:
    if name.endswith("c_attn.bias"):  # the second third is the keys' bias
        width = ours[name].numel() // 3
        value = ours[name].clone()
        value[width : 2 * width] = plain.get_parameter(name).detach()[width : 2 * width]
        return value
    return ours[name]


def trained(job: str, strategy: str, optimizer: str, micro: str, form: str, factor: str = "1") -> float:
    """How far the weights are from plain PyTorch's, whose losses are multiplied by the factor."""
    build, loss_fn = JOBS[job]
    adam = optimizer == "adam"
    with started(strategy=strategy or None) as run:
        model, own = run.prepare(*make(build, adam))
        loader = run.loader(Sentences(), global_batch=BATCH, micro_batch=int(micro) or None)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                if form == "loop":
                    loss = loss_fn(model, batch)
                    if isinstance(loss, paceline.Total):
                        run.backward(loss.sum / loss.count, count=loss.count)
                    else:
                        run.backward(loss)
                else:
                    run.forward_backward(loss_fn, model, batch)
                run.step(own)
        ours = whole(run)
    return apart(ours, plainly(build, loss_fn, adam, float(factor)))


def all_trained(jobs: str, strategy: str, optimizer: str, micro: str, form: str, factor: str = "1") -> dict[str, float]:
    return {job: trained(job, strategy, optimizer, micro, form, factor) for job in jobs.split()}


def all_saved(jobs: str, strategy: str, folder: str) -> None:
    """Trains each job and saves it into a folder of its own."""
    for job in jobs.split():
        build, loss_fn = JOBS[job]
        with started(strategy=strategy) as run:
            model, own = run.prepare(*make(build, False))
            loader = run.loader(Sentences(), global_batch=BATCH)
            for _ in run.epochs(EPOCHS):
                for batch in loader:
                    run.forward_backward(loss_fn, model, batch)
                    run.step(own)
            run.save(Path(folder) / job)


def refusals(strategy: str) -> str:
    """What was said wrongly, or nothing."""
    import warnings

    from paceline.errors import PacelineError

    def said(strategy: str, job: str, **more: Any) -> str:
        build, loss_fn = JOBS[job]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with started(strategy=strategy) as run:
                    model, own = run.prepare(*make(lambda: build(**more), False))
                    for batch in run.loader(Sentences(), global_batch=BATCH):
                        run.forward_backward(loss_fn, model, batch)
                        run.step(own)
                        break
            except PacelineError as error:
                return str(error)
        return "; ".join(str(w.message) for w in caught)

    if strategy.startswith("tensor"):
        cases = [
            (strategy, "gpt2", {"n_head": 1}, "has 1 heads, which 2 devices cannot share evenly"),
            (f"{strategy},plan=transformer.h.*.attn.c_attn:qkv", "gpt2", {"n_head": 1}, "has 1 heads"),
            (f"{strategy},plan=bert.encoder.*.query:column", "bert", {}, "fits no layer of the prepared model"),
        ]
    else:
        cases = [
            (f"{strategy},cut=transformer.h.9", "gpt2", {}, "Did you mean transformer.h."),
            (f"{strategy},cut=albert.encoder.albert_layer_groups.0#9", "albert", {}, "albert_layer_groups.0#2"),
            (f"{strategy},cut=1,2", "bert", {}, "2 stages need 1 split point(s)"),
        ]
    for case, job, more, words in cases:
        text = said(case, job, **more)
        if words not in text and dist.get_rank() == 0:
            return f"{case}: {words!r} is not in {text!r}"
    return ""
