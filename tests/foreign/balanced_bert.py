"""A classifier of transformers, fed by its collator, with `--balance`: `python -m tests.foreign.balanced_bert FOLDER`.

transformers is imported first, as in most scripts. The clock is set by the model's forwards, and the last rank is slow.
KILLED=1 ends rank 1 with SIGKILL in the first life of the run. FOLDER gets the weights, and the shares at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import transformers  # isort: skip  # before torch
import torch
from safetensors.torch import save_file
from tests.balance.test_balance import SECONDS, SetClock, on_set_clock
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, DataCollatorWithPadding

import paceline

EXAMPLES, BATCH, EPOCHS, DIES_AT = 240, 12, 4, 45


def made_tokenizer(folder: Path) -> BertTokenizerFast:
    path = folder / f"vocabulary-{os.environ['RANK']}.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(95))]))
    return BertTokenizerFast(vocab_file=str(path))


def examples(tokenizer: BertTokenizerFast) -> list[dict[str, Any]]:
    """Sentences of 3 to 11 words."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (EXAMPLES,), generator=draw).tolist()
    sentences = [" ".join(f"w{n}" for n in torch.randint(95, (m,), generator=draw).tolist()) for m in lengths]
    return [{**tokenizer(text), "labels": number % 3} for number, text in enumerate(sentences)]


def made_model() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    noise = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=3, **sizes, **noise)).double()


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    run = paceline.start(device="cpu", progress="off")
    model = made_model()
    seconds = SECONDS[run.rank == run.world_size - 1]

    def pass_time(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        SetClock.moment += seconds * len(named["input_ids"])

    model.register_forward_pre_hook(pass_time, with_kwargs=True)
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    tokenizer = made_tokenizer(folder)
    data = examples(tokenizer)
    loader = run.loader(data, global_batch=BATCH, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
    dies = "KILLED" in os.environ and run.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    run.restore(folder / "checkpoint", missing_ok=True)
    share = 0
    for _ in run.epochs(EPOCHS):
        for batch in loader:
            share = loader.examples
            run.backward(model(**batch).loss)
            run.step(optimizer)
            if dies and run.steps == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if run.steps % 20 == 0:
                run.save(folder / "checkpoint")
    shares = run.gather([share])
    weights = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in
               model.state_dict().items()}  # fmt: skip
    if run.main:
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / "weights.safetensors")
        (folder / "shares").write_text(" ".join(map(str, shares)))
    run.close()


if __name__ == "__main__":
    with on_set_clock():
        main(Path(sys.argv[1]))
