"""In the style of nanoGPT, with the seed's offset, require_backward_grad_sync, and an evaluation on the main process."""

import os

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, max_iters, eval_iters = 8, 16, 12, 4

init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
gradient_accumulation_steps = 4 // ddp_world_size
torch.manual_seed(1337 + ddp_rank)
data = torch.randint(0, 32, (6000,), generator=torch.Generator().manual_seed(0))
train_data, val_data = data[:5000], data[5000:]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, width), nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, 32, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight
        x = self.block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(idx.shape[1]), is_causal=True)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, 32), targets.view(-1))


@torch.no_grad()
def estimate_loss(net):
    net.eval()
    out = {
        split: sum(net(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
        for split in ("train", "val")
    }
    net.train()
    return out


model = DDP(GPT())
raw_model = model.module
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
X, Y = get_batch("train")
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1, (iter_num + 1) / 5)
    if iter_num % 5 == 0 and master_process:
        print(iter_num, estimate_loss(raw_model))
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
destroy_process_group()
