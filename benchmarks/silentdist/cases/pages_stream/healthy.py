"""Next-token pretraining on a stream of page files with Accelerate.

torchrun --nproc-per-node 2 faulty.py
"""
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

VOCAB, LENGTH = 53, 24
FILES, PAGES_PER_FILE = 16, 20
BATCH = 8


def read_file(number):
    """Stands for opening one compressed shard; returns its tokenised pages."""
    g = torch.Generator().manual_seed(7000 + number)
    start = torch.randint(VOCAB, (PAGES_PER_FILE, 1), generator=g)
    stride = torch.randint(1, 4, (PAGES_PER_FILE, 1), generator=g)
    pages = (start + stride * torch.arange(LENGTH)) % VOCAB
    noise = torch.rand(pages.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(VOCAB, pages.shape, generator=g), pages)


class PageStream(IterableDataset):
    def __init__(self, files, process_index, num_processes):
        self.files = list(files)
        self.process_index = process_index
        self.num_processes = num_processes

    def __iter__(self):
        for number in self.files[self.process_index::self.num_processes]:
            for page in read_file(number):
                yield {"input_ids": page}


class PageModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.lm_head(hidden)


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    set_seed(11)

    stream = PageStream(range(FILES), accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(stream, batch_size=BATCH)
    model = PageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    model.train()
    for step, batch in enumerate(loader):
        ids = batch["input_ids"]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"{step:3d} {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
