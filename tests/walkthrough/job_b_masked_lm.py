"""(b) A masked language model: masks drawn in the collate function, a loss weighted by masked tokens, micro-batches,
gradient clipping. Variant `two_terms`: a next-sentence loss, a mean over examples, in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

from .common import Case, Result, make_optimizer, result_of
from .record import Record, Step, legal_epochs

if TYPE_CHECKING:
    from paceline import Run

N, BATCH, EPOCHS = 45, 12, 8  # 4 steps an epoch, the last of 9 examples
MICRO = 2
VARIANTS = ("mlm", "two_terms")
WORDS, LONGEST, WIDTH, HEADS = 20, 10, 16, 2
PAD, MASK, FIRST_WORD, IGNORED = 0, 1, 2, -100
MAX_NORM = {"mlm": 1.3, "two_terms": 1.6}  # about half of the steps are clipped


class Sentences(Dataset[dict[str, Any]]):
    """Sentences of 4 to 10 words that count upwards, and whether the last word is even."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        start, length = 7 * i % 11, 4 + i % 7
        words = [FIRST_WORD + (start + k * (1 + i % 2)) % (WORDS - FIRST_WORD) for k in range(length)]
        return {"words": words, "next": words[-1] % 2, "index": i}


def pad(sentences: list[list[int]]) -> Tensor:
    """Word ids (batch, longest), padded at the end."""
    longest = max(map(len, sentences), default=0)
    return torch.tensor([words + [PAD] * (longest - len(words)) for words in sentences], dtype=torch.long)


def mask_and_pad(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The collate function: hides 15% of the words, drawn here."""
    words = pad([e["words"] for e in examples])
    hidden = (torch.rand(words.shape) < 0.15) & (words != PAD)
    return {
        "words": words.masked_fill(hidden, MASK),
        "hidden": words.masked_fill(~hidden, IGNORED),
        "next": torch.tensor([e["next"] for e in examples]),
        "index": torch.tensor([e["index"] for e in examples]),
    }


class Encoder(nn.Module):
    """One layer of attention, without the key bias: its gradient is mathematically zero, and only rounding moves it."""

    def __init__(self, two_terms: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix, self.norm1, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.words = nn.Linear(WIDTH, WORDS)
        self.next = nn.Linear(WIDTH, 2) if two_terms else None

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """(batch, length) -> logits of words (batch, length, WORDS), of the next sentence (batch, 2)."""
        x = self.norm1(self.embed(words) + self.place(torch.arange(words.shape[1])))
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).masked_fill(
            (words == PAD)[:, None, None], -torch.inf
        )
        x = x + self.mix((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = self.norm2(x + self.hidden(x))
        return self.words(x), self.next(x[:, 0]) if self.next is not None else None


def build(case: Case, seed: int) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(case.variant == "two_terms")


def words_loss(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    """Over the hidden words of this batch; the mean over none is NaN."""
    return F.cross_entropy(model(batch["words"])[0].flatten(0, 1), batch["hidden"].flatten(), reduction=reduction)


def next_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"])[1], batch["next"])


def closure(model: nn.Module, batch: dict[str, Tensor]) -> paceline.Total:
    return paceline.Total(words_loss(model, batch, "sum"), (batch["hidden"] != IGNORED).sum())


def closure_two_terms(model: nn.Module, batch: dict[str, Tensor]) -> tuple[paceline.Total, Tensor]:
    words, following = model(batch["words"])
    total = F.cross_entropy(words.flatten(0, 1), batch["hidden"].flatten(), reduction="sum")
    return paceline.Total(total, (batch["hidden"] != IGNORED).sum()), F.cross_entropy(following, batch["next"])


def count_hidden(batch: dict[str, Tensor]) -> Tensor:
    return (batch["hidden"] != IGNORED).sum()


def len_of(batch: dict[str, Tensor]) -> int:
    return len(batch["next"])


def hidden_places(batch: dict[str, Tensor]) -> dict[str, list[Any] | Tensor]:
    return {"hidden": [row.nonzero().flatten().tolist() for row in batch["hidden"] != IGNORED]}


def paceline_job(run: Run, case: Case) -> Result:
    record = Record()
    two_terms = case.variant == "two_terms"
    loader = run.loader(
        Sentences(), global_batch=BATCH, micro_batch=case.micro_batch, shuffle=True, collate_fn=mask_and_pad
    )
    model = build(case, case.seed + run.world.rank)
    model, optimizer = run.prepare(model, make_optimizer(case, model.parameters()))

    means = []
    for epoch in run.epochs(EPOCHS):
        for batch in loader:
            losses, count = {}, count_hidden
            if case.form == "closure":
                loss = run.forward_backward(closure_two_terms if two_terms else closure, model, batch)
                if not two_terms:
                    losses["words"] = loss
                    means.append(float(run.mean(loss)))  # weighs by what the loss is a mean over: hidden words
            elif two_terms:  # two calls in one step, each with its own denominator
                words, following = words_loss(model, batch, "sum"), next_loss(model, batch)
                run.backward(total=words, count=count_hidden(batch))
                run.backward(following)
                losses["next"], count = following, len_of
            else:
                loss = words_loss(model, batch)
                run.backward(loss, count=count_hidden(batch))
                losses["words"] = loss
            record.note(loader, batch, losses=losses, count=count, drawn=hidden_places)
            if run.step(optimizer, max_grad_norm=MAX_NORM[case.variant]):
                record.close_step(epoch)

    # Evaluation: every second word hidden; right guesses, and the loss per hidden word.
    model.eval()
    right, total, count = 0, 0.0, 0
    with torch.no_grad():
        for batch in run.loader(Sentences(), global_batch=8, train=False, collate_fn=every_second):
            guesses, hidden = model(batch["words"])[0].argmax(-1), batch["hidden"]
            right += int((guesses == hidden).sum())
            count += int((hidden != IGNORED).sum())
            total += float(words_loss(model, batch, "sum"))
    metrics = {"right": int(run.sum(right)), "hidden": int(run.sum(count)), "steps": run.steps}
    values = {"loss": float(run.ratio(total, count))}
    if means and not case.micro_batch:
        values["mean of training losses"] = sum(means) / len(means)
    return result_of(model, metrics=metrics, values=values, record=record)


def every_second(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    words = pad([e["words"] for e in examples])
    hidden = (torch.arange(words.shape[1]) % 2 == 1) & (words != PAD)
    return {"words": words.masked_fill(hidden, MASK), "hidden": words.masked_fill(~hidden, IGNORED)}


def plain_job(case: Case, steps: list[Step]) -> Result:
    sentences = Sentences()
    model = build(case, case.seed)
    optimizer = make_optimizer(case, model.parameters())
    losses, clipped = [], 0

    for epoch in legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=case.micro_batch):
        for step in epoch:
            words = pad([sentences[i]["words"] for i in step.batch.ids])
            hidden = torch.zeros_like(words, dtype=torch.bool)
            for row, places in enumerate(step.batch.drawn["hidden"]):
                hidden[row, places] = True
            assert not (hidden & (words == PAD)).any(), "padding was hidden"
            optimizer.zero_grad()
            guesses, following = model(words.masked_fill(hidden, MASK))
            terms = {"words": F.cross_entropy(guesses[hidden], words[hidden])}
            if following is not None:
                terms["next"] = F.cross_entropy(following, torch.tensor([sentences[i]["next"] for i in step.batch.ids]))
            sum(terms.values()).backward()  # type: ignore[union-attr]
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM[case.variant])
            clipped += int(norm > MAX_NORM[case.variant])
            optimizer.step()
            losses.append({name: term.item() for name, term in terms.items()})
    assert case.breakage or 0 < clipped < len(steps), (
        f"{clipped} of {len(steps)} steps were clipped: the job shows nothing"
    )
    check_drawn(steps)

    batch = every_second([sentences[i] for i in range(N)])
    with torch.no_grad():
        right = int((model(batch["words"])[0].argmax(-1) == batch["hidden"]).sum())
        values = {"loss": words_loss(model, batch).item()}
    if (case.form, case.variant, case.micro_batch) == ("closure", "mlm", None):
        values["mean of training losses"] = sum(loss["words"] for loss in losses) / len(losses)
    metrics = {"right": right, "hidden": int((batch["hidden"] != IGNORED).sum()), "steps": len(steps)}
    return result_of(model, metrics=metrics, values=values, losses=losses)


def check_drawn(steps: list[Step]) -> None:
    """About 15% of the words are hidden, and others of a sentence in other epochs."""
    hidden: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(N)}
    for step in steps:
        for i, places in zip(step.batch.ids, step.batch.drawn["hidden"], strict=True):
            hidden[i].append(tuple(places))
    words = sum(len(Sentences()[i]["words"]) * len(epochs) for i, epochs in hidden.items())
    share = sum(len(places) for epochs in hidden.values() for places in epochs) / words
    assert 0.12 < share < 0.18, f"{share:.1%} of {words} words were hidden"
    assert all(len(set(epochs)) > 1 for epochs in hidden.values()), "a sentence is masked alike in every epoch"
