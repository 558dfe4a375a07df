"""CTC on a stream of utterances: the loss is a sum with the number of symbols as its count."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

import paceline

BLANK = 0


class Spoken(IterableDataset):
    def __iter__(self):
        codes = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for i in range(150):
            g = torch.Generator().manual_seed(100 + i)
            text = torch.randint(1, 7, (int(torch.randint(2, 8, (), generator=g)),), generator=g)
            sound = codes[text.repeat_interleave(3)]
            yield sound + 0.2 * torch.randn(sound.shape, generator=g, dtype=torch.float64), text


def collate(batch):
    sounds, texts = zip(*batch)
    lengths = torch.tensor([len(s) for s in sounds]), torch.tensor([len(t) for t in texts])
    return pad_sequence(sounds, batch_first=True), torch.cat(texts), *lengths


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(5, 24, batch_first=True), nn.Linear(24, 7)

    def forward(self, sounds):
        return self.out(self.rnn(sounds)[0]).log_softmax(2).transpose(0, 1)


def main():
    run = paceline.start(seed=61)
    model = Listener().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(Spoken(), global_batch=25, collate_fn=collate, num_workers=1)
    for _ in run.epochs(2):
        for sounds, texts, sound_lengths, text_lengths in loader:
            total = F.ctc_loss(
                model(sounds), texts, sound_lengths, text_lengths, blank=BLANK, reduction="sum", zero_infinity=True
            )
            run.backward(total=total, count=text_lengths.sum())
            run.step(optimizer, max_grad_norm=2.0)


if __name__ == "__main__":
    main()
