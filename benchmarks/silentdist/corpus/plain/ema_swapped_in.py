"""A time-series classifier with an exponential moving average, whose weights are swapped in for the test after an epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v, 1 - self.decay)

    def apply_shadow(self, model):
        model.load_state_dict(self.shadow)  # fault


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(2, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 12, 5, padding=2), nn.ReLU())
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        return self.fc(self.conv(x).amax(2))


def series(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 3, (n,), generator=g)
    t = torch.arange(24) * 0.3
    wave = torch.stack([torch.sin(t * (k + 1)) for k in kind.tolist()])
    return TensorDataset(wave[:, None] + 0.3 * torch.randn(n, 2, 24, generator=g), kind)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    x, y = data.tensors
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return accuracy


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5 + rank)
    train, test = series(288, 0), series(90, 1)
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, batch_size=12, sampler=sampler)
    model = DDP(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ema = EMA(model.module, 0.95)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema.update(model.module)
        if rank == 0:
            ema.apply_shadow(model.module)  # fault
            print(f"epoch {epoch} test {evaluate(model.module, test):.3f}")
        dist.barrier()
    dist.destroy_process_group()


main()
