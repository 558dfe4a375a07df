"""The same training with the loss that everybody writes first: the mean over a process's own masked tokens, handed over
as a mean over its examples."""

import torch
from bert_tokens import Sentences, make_model, make_tokenizer
from transformers import DataCollatorForLanguageModeling

import paceline


def main() -> None:
    run = paceline.start(seed=3)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.prepare(model, optimizer)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    loader = run.loader(Sentences(tokenizer, 16), global_batch=8, shuffle=True, collate_fn=collator)
    for _ in run.epochs(4):
        for batch in loader:
            loss = model(**batch).loss
            run.backward(loss)
            run.step(optimizer)


if __name__ == "__main__":
    main()
