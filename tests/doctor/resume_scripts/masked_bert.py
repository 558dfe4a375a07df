"""Masked language modelling: BERT from a config, a tokenizer of its own, the collator of transformers."""

import argparse
import os
from itertools import product

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(words):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIAL + words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    )


def sentences(words, n):
    g = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(words), (n,), generator=g).tolist()
    strides = torch.randint(1, 4, (n,), generator=g).tolist()
    return [
        " ".join(words[(start + k * stride) % len(words)] for k in range(12)) for start, stride in zip(starts, strides)
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume_from_checkpoint", default=None)
    options = parser.parse_args()
    set_seed(42)

    words = ["".join(syllables) for syllables in product(["ka", "lo", "mi", "re", "su", "to"], repeat=2)]
    tokenizer = make_tokenizer(words)
    dataset = [tokenizer(sentence) for sentence in sentences(words, 160)]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    arguments = TrainingArguments(
        output_dir=options.out,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=2,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=3,
        logging_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=BertForMaskedLM(config),
        args=arguments,
        train_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2),
    )
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    if trainer.is_world_process_zero() and "FINAL" in os.environ:
        torch.save(trainer.model.state_dict(), os.environ["FINAL"])


if __name__ == "__main__":
    main()
