"""FixMatch (Sohn et al. 2020): few labelled examples, many unlabelled ones, pseudo-labels where the model is sure."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MU, THRESHOLD, LAMBDA_U = 3, 0.8, 1.0


class Blobs(Dataset):
    def __init__(self, n, seed, labelled):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = F.one_hot(self.y, 8).float() * 2 + 0.6 * torch.randn(n, 8, generator=g)
        self.labelled = labelled

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        weak = self.x[i] + 0.05 * torch.randn(8)
        return (weak, self.y[i]) if self.labelled else (weak, self.x[i] * (torch.rand(8) > 0.3))


def main(seed=19, batch_size=8, epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(seed + dist.get_rank())
    labelled, unlabelled = Blobs(96, 0, True), Blobs(288, 1, False)
    labelled_sampler = DistributedSampler(labelled)
    labelled_loader = DataLoader(labelled, batch_size, sampler=labelled_sampler, drop_last=True)
    order = torch.Generator().manual_seed(seed)
    unlabelled_loader = DataLoader(unlabelled, MU * batch_size, shuffle=True, generator=order, drop_last=True)  # fault
    model = DDP(nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(epochs):
        labelled_sampler.set_epoch(epoch)
        for (x, y), (weak, strong) in zip(labelled_loader, unlabelled_loader):
            logits = model(torch.cat([x, weak, strong]))
            logits_x, (logits_w, logits_s) = logits[: len(x)], logits[len(x) :].chunk(2)
            confidence, pseudo = logits_w.detach().softmax(1).max(1)
            mask = (confidence >= THRESHOLD).float()
            loss_u = (F.cross_entropy(logits_s, pseudo, reduction="none") * mask).mean()
            loss = F.cross_entropy(logits_x, y) + LAMBDA_U * loss_u
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
