"""fit() with dropout, evaluation, a schedule by epochs, the best model, and a callback that prints on the main process."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

import paceline


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.encoder(self.emb(x)).mean(1))


class Printer(paceline.Callback):
    def on_epoch_end(self, fit):
        if fit.run.main:
            print("epoch", fit.epoch, {k: round(v, 4) for k, v in fit.values.items()})


def loss_fn(model, batch):
    words, label = batch
    return F.cross_entropy(model(words), label)


def accuracy(outputs, batch):
    return outputs.argmax(1) == batch[1]


def main():
    g = torch.Generator().manual_seed(8)
    words = torch.randint(0, 20, (260, 10), generator=g)
    data = TensorDataset(words, (words < 5).sum(1).gt(2).long())
    train, valid = random_split(data, [200, 60], generator=torch.Generator().manual_seed(0))
    run = paceline.start(seed=8, progress="off")
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = paceline.PerEpoch(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    paceline.fit(
        model,
        loss_fn,
        train,
        run=run,
        optimizer=optimizer,
        scheduler=scheduler,
        global_batch=40,
        epochs=2,
        evaluate_on=valid,
        metrics={"accuracy": accuracy},
        callbacks=[Printer()],
        best=paceline.Best(monitor="val_accuracy", path=Path(tempfile.gettempdir()) / "best_of_corpus.safetensors"),
    )


main()
