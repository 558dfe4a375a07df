import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

VOCAB, DIM, EXPERTS, LENGTH = 40, 24, 4, 12
ROUTER_WEIGHT = 0.1


class RoutedLM(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(19)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))
        self.head = nn.Linear(DIM, VOCAB)

    def backbone(self, input_ids):
        h, _ = self.rnn(self.embed(input_ids))
        probs = self.gate(h).softmax(-1)
        used = F.one_hot(probs.argmax(-1), EXPERTS).float()
        stacked = torch.stack([e(h) for e in self.experts], dim=2)
        h = h + torch.tanh((stacked * (used * probs)[..., None]).sum(2))
        aux = EXPERTS * (used.mean(1) * probs.mean(1)).sum(-1).mean()
        return self.head(h), aux

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits, aux = self.backbone(input_ids)
        if labels is None:
            return {"logits": logits}
        token_sum = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                    ignore_index=-100, reduction="sum")
        if num_items_in_batch is None:
            num_items_in_batch = (labels[:, 1:] != -100).sum()
        loss = token_sum / num_items_in_batch + ROUTER_WEIGHT * aux
        return {"loss": loss, "logits": logits}


class Copies(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(23)
        self.ids = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
        self.cut = torch.randint(1, LENGTH - 1, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: self.cut[i]] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def main():
    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "routed_lm"),
        per_device_train_batch_size=8,
        max_steps=10,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    model = RoutedLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    trainer = Trainer(model=model, args=args, train_dataset=Copies(), optimizers=(optimizer, None))
    trainer.train()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
