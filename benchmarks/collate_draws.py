"""The cost of random numbers keyed by example, in a collate function and in a model.

    python benchmarks/collate_draws.py --out benchmarks/collate_draws.json     # two minutes on one core

Collate: Hugging Face's DataCollatorForLanguageModeling on 32 examples of 128 tokens (without transformers: masks from
the same torch calls), unchanged, with generators seeded per batch, and with each row drawn from its example's stream.
Model: forward and backward of a transformer encoder with dropout, with noise by shard and by example. The variants are
timed in a new random order every round. Shown are medians and the 5th and 95th percentile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.batch_plan import Part, Request
from paceline.data.collating import Collator, Streams
from paceline.data.noise import Noise, NoiseMode
from paceline.data.randomness import seed_all

EXAMPLES, TOKENS, VOCABULARY = 32, 128, 30000


def stand_in(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """The same torch calls as the collator, without its tokenizer."""
    inputs = torch.tensor([example["input_ids"] for example in examples])
    labels = inputs.clone()
    masked = torch.bernoulli(torch.full(labels.shape, 0.15)).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked
    inputs[replaced] = 4
    other = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked & ~replaced
    inputs[other] = torch.randint(VOCABULARY, labels.shape)[other]
    return {"input_ids": inputs, "labels": labels}


def collator() -> tuple[str, Callable[[list[Any]], Any]]:
    try:
        from tokenizers import Tokenizer, models
        from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast
    except ImportError:
        return "the collator's torch calls (transformers is not installed)", stand_in
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
    words |= {f"w{i}": i for i in range(len(words), VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    return "DataCollatorForLanguageModeling", DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)


def compare(variants: dict[str, Callable[[], object]], seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of each variant: median, 5th and 95th percentile."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in random.sample(list(variants), len(variants)):
            began = time.perf_counter()
            variants[name]()
            times[name].append((time.perf_counter() - began) * 1e6)
    return {
        name: {
            "median_us": round(statistics.median(taken), 1),
            "p5_us": round(float(np.percentile(taken, 5)), 1),
            "p95_us": round(float(np.percentile(taken, 95)), 1),
            "rounds": len(taken),
        }
        for name, taken in times.items()
    }


def in_collate(seconds: float) -> tuple[str, dict[str, dict[str, float]]]:
    name, collate = collator()
    examples = [{"input_ids": torch.randint(5, VOCABULARY, (TOKENS,)).tolist()} for _ in range(EXAMPLES)]
    part = Part(0, 0, tuple(range(EXAMPLES)))
    request = Request(0, 0, 0, 1, EXAMPLES, 0, (part,))
    keyed = Collator(collate, Streams(0, "train"))

    def seeded() -> object:
        seed_all(5)
        return collate([dict(example) for example in examples])

    return name, compare(
        {
            "as it is": lambda: collate([dict(example) for example in examples]),
            "generators keyed for the batch": seeded,
            "rows keyed by the example": lambda: keyed.batch(request, part, [dict(example) for example in examples]),
        },
        seconds,
    )


def in_model(seconds: float) -> dict[str, dict[str, float]]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(16, 64, 128)
    part = Part(0, 0, tuple(range(16)))
    request, streams = Request(0, 0, 0, 1, 16, 0, (part,)), Streams(0, "train")

    def step() -> object:
        model(x).square().mean().backward()
        return model.zero_grad()

    def by_example() -> object:
        with noise.for_closure(streams, request, part, 0):
            return step()

    noise = Noise()
    noise.close()  # on only for its variant
    mode = NoiseMode(noise)

    def with_mode() -> object:
        with mode:
            return by_example()

    return compare({"noise by shard": step, "noise by example": with_mode}, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="for each of the comparisons")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    torch.set_num_threads(1)
    name, collated = in_collate(given.seconds)
    result = {
        "what": f"{name}, {EXAMPLES} examples of {TOKENS} tokens",
        "command": shlex.join(["python", *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "collate": collated,
        "model": {"what": "2 layers of a transformer, 16 x 64 x 128, forward and backward", **in_model(given.seconds)},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


def machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(names) or 1,
        "threads": 1,
        "accelerators": 0,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
