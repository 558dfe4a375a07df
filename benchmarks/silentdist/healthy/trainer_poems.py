"""Hugging Face Trainer: causal language model on padded poems with gradient accumulation."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

PER_DEVICE = 4
VOCAB = 32


def poems(n=160):
    g = torch.Generator().manual_seed(6)
    rows = []
    for _ in range(n):
        length = int(torch.randint(3, 20, (1,), generator=g))
        first = int(torch.randint(1, VOCAB, (1,), generator=g))
        rows.append([1 + (first + 5 * k) % (VOCAB - 1) for k in range(length)])
    return rows


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main():
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PER_DEVICE,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=True,
        num_train_epochs=2,
        learning_rate=3e-3,
        adam_epsilon=1e-5,
        lr_scheduler_type="cosine",
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    set_seed(11)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=poems(), data_collator=collate)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} updates, loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
