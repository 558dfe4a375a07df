"""A language model on padded texts: each process divides by the number of its own tokens, and DDP averages the means."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0


class Texts(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(3, 30, (n,), generator=g).tolist()
        self.texts = [torch.randint(1, 25, (k,), generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i]


def collate(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(25, 24), nn.GRU(24, 24, batch_first=True), nn.Linear(24, 25)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(LM())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = Texts()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = criterion(model(x[:, :-1]).transpose(1, 2), x[:, 1:])  # fault
            optimizer.zero_grad()
            loss.backward()  # fault
            optimizer.step()
    dist.destroy_process_group()


main()
