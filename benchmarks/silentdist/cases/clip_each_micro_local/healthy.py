import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

CFG = {"updates": 12, "accumulate": 3, "rows": 10, "max_norm": 0.5, "lr": 0.1}


class VAE(nn.Module):
    def __init__(self, inputs=20, latent=4):
        super().__init__()
        self.enc = nn.Linear(inputs, 32)
        self.stats = nn.Linear(32, 2 * latent)
        self.dec = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, inputs))

    def forward(self, x, eps):
        mean, logvar = self.stats(torch.relu(self.enc(x))).chunk(2, dim=-1)
        return self.dec(mean + eps * (0.5 * logvar).exp()), mean, logvar


def make_vae():
    torch.manual_seed(88)
    return VAE()


def draw(update, i, rank):
    g = torch.Generator().manual_seed(update * 100 + i * 10 + rank)
    spread = 1.0 + 2.0 * rank + i
    x = spread * torch.randn(CFG["rows"], 20, generator=g)
    return x, torch.randn(CFG["rows"], 4, generator=g)


def elbo(model, x, eps):
    recon, mean, logvar = model(x, eps)
    kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1)
    return (F.mse_loss(recon, x, reduction="none").sum(1) + kl).mean()


def one_update(model, opt, update, rank):
    k = CFG["accumulate"]
    losses = []
    for i in range(k):
        x, eps = draw(update, i, rank)
        if i < k - 1:
            with model.no_sync():
                loss = elbo(model, x, eps)
                (loss / k).backward()
        else:
            loss = elbo(model, x, eps)
            (loss / k).backward()
        losses.append(loss.item())
    clip_grad_norm_(model.parameters(), CFG["max_norm"])
    opt.step()
    opt.zero_grad()
    return sum(losses) / k


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DDP(make_vae())
    opt = torch.optim.SGD(model.parameters(), lr=CFG["lr"])
    schedule = CosineAnnealingLR(opt, CFG["updates"])
    for update in range(CFG["updates"]):
        value = one_update(model, opt, update, dist.get_rank())
        schedule.step()
        if dist.get_rank() == 0:
            print(f"{update:02d} elbo {value:.3f}")
    dist.barrier()
    dist.destroy_process_group()
