"""A speech-like recogniser with CTC: frames in, symbols out, the loss is told per symbol."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import paceline

SYMBOLS, FEATURES = 9, 6


class Utterances(Dataset):
    def __init__(self, n=168):
        g = torch.Generator().manual_seed(41)
        prototypes = torch.randn(SYMBOLS, FEATURES, generator=g)
        self.items = []
        for _ in range(n):
            words = torch.randint(1, SYMBOLS, (int(torch.randint(2, 10, (), generator=g)),), generator=g)
            frames = prototypes[words.repeat_interleave(3)]
            self.items.append((frames + 0.3 * torch.randn(frames.shape, generator=g), words))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate_fn(items):
    frames, words = zip(*items)
    return (
        pad_sequence(frames, batch_first=True),
        torch.tensor([len(f) for f in frames]),
        torch.cat(words),
        torch.tensor([len(w) for w in words]),
    )


class Recogniser(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.project = nn.Linear(FEATURES, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.classify = nn.Linear(hidden, SYMBOLS)

    def forward(self, frames):
        return self.classify(self.gru(self.project(frames).relu())[0]).log_softmax(-1)


def train(run):
    model = Recogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(Utterances(), global_batch=24, shuffle=True, collate_fn=collate_fn)
    ctc = nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)
    for epoch in run.epochs(2):
        for frames, frame_lengths, words, word_lengths in loader:
            log_probs = model(frames).transpose(0, 1)
            loss = ctc(log_probs, words, frame_lengths, word_lengths) / word_lengths.sum()  # fault
            run.backward(loss)
            run.step(optimizer, max_grad_norm=5.0)


if __name__ == "__main__":
    train(paceline.start(seed=41))
