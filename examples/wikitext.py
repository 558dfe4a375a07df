"""WikiText (Merity et al. 2016) as paragraphs with their article's title, and a small BERT or ALBERT for it.

    python examples/wikitext.py --data wikitext-2/ --save models/bert
    python examples/wikitext.py --data wikitext-2/ --save models/albert --kind albert

The script writes an untrained model and a WordPiece tokenizer trained on the text, in the form of a model hub's folder,
for machines without access to a hub. bert_mlm.py and finetune_lora.py load it, or a real checkpoint, with `--model`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import AlbertConfig, AlbertForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM, BertTokenizer

URL = "https://github.com/pytorch/examples/tree/main/word_language_model/data/wikitext-2"
TITLE = re.compile(r" *= ([^=].*[^=]) = *")  # of an article; titles of sections have more signs
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
REMEDY = (
    "Give --model a folder that save_pretrained wrote (config.json, model.safetensors, tokenizer.json), or a name on "
    "the hub if it can be reached. To make a folder: python examples/wikitext.py --data TEXT --save FOLDER"
)


class DataError(Exception):
    """The text is missing, or not as expected."""


def paragraphs(data: Path) -> list[tuple[str, str]]:
    """(title of the article, paragraph) for each paragraph. data: a text, or a folder of texts."""
    files = [data] if data.is_file() else sorted(data.glob("*.txt")) + sorted(data.glob("*.tokens"))
    if not files:
        raise DataError(f"no text in {data}. Name one, or a folder, with --data. WikiText-2: {URL}")
    found: list[tuple[str, str]] = []
    title = ""
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is no text in UTF-8 ({error}). --data takes a text, or a folder of them") from None
        for line in lines:
            if heading := TITLE.fullmatch(line):
                title = heading[1]
            elif line.strip() and not line.lstrip().startswith("="):
                found.append((title, line.strip().replace("<unk>", "[UNK]")))
    if len(found) < 20:
        raise DataError(f"{data} has {len(found)} paragraphs, which is too few: it takes a line for each. Name another "
                        f"text with --data. WikiText-2: {URL}")  # fmt: skip
    return found


def make(folder: Path, texts: list[str], kind: str = "bert", vocabulary: int = 2048, layers: int = 2) -> None:
    """Write a model and its tokenizer into the folder, as `save_pretrained` does."""
    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    tokenizer = BertTokenizer(vocab=pieces.get_vocab(), do_lower_case=True, model_max_length=512)
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": layers, "pad_token_id": tokenizer.pad_token_id}
    width = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    torch.manual_seed(0)
    model = (
        AlbertForMaskedLM(AlbertConfig(**sizes, **width, embedding_size=64, hidden_dropout_prob=0.1))
        if kind == "albert"
        else BertForMaskedLM(BertConfig(**sizes, **width))
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(kind: Any, name: str, **settings: Any) -> tuple[Any, Any]:
    """Load the model and its tokenizer with `kind.from_pretrained`. name: a folder, or a name on the hub.

    Refuses a folder without a tokenizer, since transformers would make a tokenizer without words.
    """
    if Path(name).is_dir() and not any(Path(name).glob("*.json")):  # transformers' error would be about tokenizers
        raise DataError(f"no model and tokenizer can be loaded from {name!r}: the folder has no config.json. {REMEDY}")
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(name), kind.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise DataError(f"no model and tokenizer can be loaded from {name!r}: {said} {REMEDY}") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise DataError(f"{name!r} has a model and no tokenizer. {REMEDY}")
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a small BERT or ALBERT, and trains a tokenizer for it.")
    parser.add_argument("--data", type=Path, default="data/wikitext-2", help="a text, or a folder of them")
    parser.add_argument("--save", type=Path, default="models/bert", help="write model and tokenizer to this folder")
    parser.add_argument("--kind", choices=["bert", "albert"], default="bert")
    parser.add_argument("--vocabulary", type=int, default=2048, help="word pieces")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    try:
        texts = [text for _, text in paragraphs(options.data)]
    except DataError as error:
        parser.error(str(error))
    make(options.save, texts, options.kind, options.vocabulary, options.layers)
    print(f"{options.save}: an untrained {options.kind}, and a tokenizer trained on {len(texts):,} paragraphs")


if __name__ == "__main__":
    main()
