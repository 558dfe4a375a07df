"""Masked-language-model training of a tiny BERT with Hugging Face's collator. The loss is a sum over masked tokens,
and is handed over with their number."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import paceline

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "a fox is quick",
    "pack my box with five dozen liquor jugs and leave them in the hall until the fox has gone",
    "how vexingly quick daft zebras jump",
    "the five boxing wizards jump quickly over the hall and the dog and the box of jugs",
    "dogs sleep",
    "the zebra and the fox leave the box",
    "bright vixens jump and dozy fowl quack over the five dozen dogs",
]
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=list(SPECIAL.values())))
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


class Sentences(Dataset):
    """Of different lengths; 19, so that a last global batch of 8 is cut unevenly."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, length: int = 19) -> None:
        self.encoded = [tokenizer("[CLS] " + LINES[i * 5 % len(LINES)] + " [SEP]") for i in range(length)]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": self.encoded[i]["input_ids"], "attention_mask": self.encoded[i]["attention_mask"]}


def make_model(vocabulary: int) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).double()


def masked_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> paceline.Total:
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    total = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="sum")
    return paceline.Total(total, (labels != -100).sum())


def main() -> None:
    run = paceline.start(seed=3)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.prepare(model, optimizer)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    loader = run.loader(Sentences(tokenizer), global_batch=8, shuffle=True, collate_fn=collator)
    for _ in run.epochs(4):
        for batch in loader:
            run.forward_backward(masked_loss, model, batch)
            run.step(optimizer)


if __name__ == "__main__":
    main()
