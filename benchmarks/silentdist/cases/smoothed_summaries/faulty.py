import os
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCAB, LENGTH, SMOOTHING = 50, 18, 0.1


class Summaries(Dataset):
    """Article and summary in one row; only summary tokens have labels, and summaries differ in length."""

    def __init__(self, n=320, seed=71):
        g = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCAB, (n, 1), generator=g)
        stride = torch.randint(1, 7, (n, 1), generator=g)
        self.ids = (first + stride * torch.arange(LENGTH)) % VOCAB
        self.begin = torch.randint(2, LENGTH - 2, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: self.begin[i]] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def tiny_gpt2():
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def smoothed_sum(logits, labels):
    """Smoothed negative log likelihood, added up over the labelled positions, and their number."""
    log_p = logits[:, :-1].log_softmax(-1)
    target = labels[:, 1:]
    keep = target != -100
    nll = -log_p.gather(2, target.clamp(min=0)[..., None]).squeeze(2)
    spread = -log_p.mean(-1)
    return ((1 - SMOOTHING) * nll + SMOOTHING * spread)[keep].sum(), keep.sum()


class SummaryTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        total, tokens = smoothed_sum(outputs.logits, labels)
        loss = total / tokens
        return (loss, outputs) if return_outputs else loss


def main():
    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "summaries"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_steps=12,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = tiny_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    trainer = SummaryTrainer(model=model, args=args, train_dataset=Summaries(), optimizers=(optimizer, None))
    trainer.train()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
