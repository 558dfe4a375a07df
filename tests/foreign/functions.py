"""Training jobs in the idiom of public projects whose data come from a function, each beside its plain original.

The original is a loop in plain PyTorch over whole batches. What a job draws at random is drawn by its own function, and
handed to the original by a loader of one process, since the order in which one process draws is what is to be kept.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import paceline
from paceline.data.batch_plan import one_shard
from paceline.data.draws import ExampleDraws
from paceline.data.loader import Loader
from paceline.data.sources import LoaderArguments, make_source
from paceline.data.user_batches import RowCollate, RowDataset, Rows

SEED, CLOSE = 5, 1e-8


def whole(fn: Callable[[Rows], Any], global_batch: int, steps: int | None) -> Loader:
    """A loader of one process, for the plain original."""
    given = LoaderArguments(global_batch=global_batch, options={"collate_fn": RowCollate(fn, global_batch)})
    source = make_source(RowDataset(global_batch, steps), given, seed=SEED, plan=partial(one_shard, 1, 0))
    return Loader(source, device=torch.device("cpu"), on_yield=lambda _: None)


@contextlib.contextmanager
def started(**settings: Any) -> Iterator[paceline.Run]:
    run = paceline.start(seed=SEED, progress="off", device="cpu", **settings)
    torch.manual_seed(11)
    try:
        yield run
    finally:
        run.close()


def distance(model: nn.Module, original: nn.Module) -> float:
    """||difference|| / ||weights|| over the whole model; all ranks call it, since slices are made whole for it."""
    ours = [v.full_tensor() if isinstance(v, DTensor) else v for v in model.state_dict().values()]
    pairs = list(zip(ours, original.state_dict().values(), strict=True))
    return math.sqrt(
        sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)
    )


# --- nanoGPT: random pieces of a text, no DataLoader


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int = 17, block: int = 6, width: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.attn = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        t = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(t))
        x = self.attn(x, src_mask=nn.Transformer.generate_square_subsequent_mask(t, dtype=x.dtype))
        return F.cross_entropy(self.lm_head(x).view(-1, 17), targets.view(-1))


def get_batch(data: Tensor, block_size: int, rows: Rows) -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - block_size, (len(rows),))  # the line that changed: (batch_size,)
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def gpt_lr(it: int, warmup: int = 2, decay: int = 8) -> float:
    return 1e-2 * (it + 1) / (warmup + 1) if it < warmup else 1e-3 + 0.9e-2 * (1 + math.cos(math.pi * it / decay)) / 2


def nanogpt(micro_batch: int | None = None, strategy: str | None = None, closure: bool = False) -> float:
    with started(strategy=strategy) as run:
        data = torch.randint(17, (400,))
        model = TinyGPT().double()
        original = copy.deepcopy(model)
        fn = functools.partial(get_batch, data, 6)

        optimizer = torch.optim.AdamW(original.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for it, (x, y) in enumerate(whole(fn, 8, 8)):
            for group in optimizer.param_groups:
                group["lr"] = gpt_lr(it)
            original(x, y).backward()
            nn.utils.clip_grad_norm_(original.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        model, optimizer = run.prepare(model, optimizer)
        loader = run.batches(fn, global_batch=8, micro_batch=micro_batch)
        for x, y in loader if not closure else ():
            for group in optimizer.param_groups:
                group["lr"] = gpt_lr(loader.step)
            run.backward(model(x, y))
            run.step(optimizer, max_grad_norm=1.0)
            if run.steps == 8:
                break
        for batch in loader if closure else ():
            for group in optimizer.param_groups:
                group["lr"] = gpt_lr(loader.step)
            run.forward_backward(lambda model, batch: model(*batch), model, batch)
            run.step(optimizer, max_grad_norm=1.0)
            if run.steps == 8:
                break
        return distance(model, original)


# --- REINFORCE: a batch of episodes, played with the policy as it is


def play(policy: nn.Module, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Ten moves of a point that is to be held near zero, for each row."""
    states, actions, rewards = [], [], []
    with torch.no_grad():
        state = torch.randn(len(rows), 2, dtype=torch.float64)
        for _ in range(10):
            action = torch.distributions.Categorical(logits=policy(state)).sample()
            push = torch.stack([torch.zeros(len(rows)), action * 2.0 - 1], 1)
            states.append(state)
            actions.append(action)
            state = state @ torch.tensor([[1.0, 0.0], [0.1, 0.95]], dtype=torch.float64) + 0.2 * push
            rewards.append(-state.square().sum(1))
    returns = torch.stack(rewards, 1).flip(1).cumsum(1).flip(1)
    return torch.stack(states, 1), torch.stack(actions, 1), returns


def policy_loss(policy: nn.Module, batch: Any) -> Tensor:
    states, actions, returns = batch
    log_prob = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
    return -(log_prob * (returns + 5)).sum(1).mean()


def reinforce(micro_batch: int | None = None, strategy: str | None = None) -> float:
    with started(strategy=strategy) as run:
        policy = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).double()
        original = copy.deepcopy(policy)

        optimizer = torch.optim.Adam(original.parameters(), lr=1e-2)
        for episodes in whole(functools.partial(play, original), 10, 6):
            optimizer.zero_grad()
            policy_loss(original, episodes).backward()
            optimizer.step()

        policy, optimizer = run.prepare(policy, torch.optim.Adam(policy.parameters(), lr=1e-2))
        for episodes in run.batches(functools.partial(play, policy), global_batch=10, steps=6, micro_batch=micro_batch):
            run.backward(policy_loss(policy, episodes))
            run.step(optimizer)
        return distance(policy, original)


# --- word_language_model: a text in columns, a hidden state that goes on from batch to batch


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(13, 6), nn.LSTM(6, 6, 2), nn.Linear(6, 13)

    def forward(self, input: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, 13), 1), hidden


def repackage_hidden(h: Any) -> Any:
    return h.detach() if isinstance(h, Tensor) else tuple(repackage_hidden(v) for v in h)


def zeros(columns: int) -> Any:
    return (torch.zeros(2, columns, 6, dtype=torch.float64), torch.zeros(2, columns, 6, dtype=torch.float64))


def word_language_model(micro_batch: int | None = None, strategy: str | None = None) -> float:
    with started(strategy=strategy) as run:
        corpus, columns, bptt = torch.randint(13, (31, 7)), 7, 5  # batchified: (length, columns)
        steps = (len(corpus) - 1) // bptt
        model = RNNModel().double()
        original = copy.deepcopy(model)

        hidden = zeros(columns)
        for i in range(0, steps * bptt, bptt):
            original.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = original(corpus[i : i + bptt], hidden)
            F.nll_loss(output, corpus[i + 1 : i + 1 + bptt].view(-1)).backward()
            nn.utils.clip_grad_norm_(original.parameters(), 0.25)
            for p in original.parameters():
                p.data.add_(p.grad, alpha=-2.0)  # type: ignore[arg-type]

        def get_batch(rows: Rows) -> tuple[Tensor, Tensor]:
            i, mine = rows.step * bptt, list(rows)
            return corpus[i : i + bptt, mine], corpus[i + 1 : i + 1 + bptt, mine]

        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0))
        loader = run.batches(get_batch, global_batch=columns, steps=steps, micro_batch=micro_batch)
        states: dict[tuple[int, ...], Any] = {}  # of each part of the columns that this process has
        for data, targets in loader:
            hidden = repackage_hidden(states.get(loader.rows, zeros(len(loader.rows))))
            output, states[loader.rows] = model(data, hidden)
            run.backward(F.nll_loss(output, targets.reshape(-1)))
            run.step(optimizer, max_grad_norm=0.25)
        return distance(model, original)


# --- pytorch/examples: a VAE, whose noise belongs to the examples


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 12)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h1 = F.dropout(F.relu(self.fc1(x)), 0.2, self.training)
        mu, logvar = self.fc21(h1), self.fc22(h1)
        h3 = F.relu(self.fc3(self.reparameterize(mu, logvar)))
        return torch.sigmoid(self.fc4(h3)), mu, logvar


def elbo(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae(micro_batch: int | None = None, strategy: str | None = None) -> float:
    with started(strategy=strategy, noise="example") as run:
        images = torch.rand(7 * 5, 12, dtype=torch.float64)

        def get_batch(rows: Rows) -> Tensor:
            return images[[rows.step * rows.total + row for row in rows]]

        model = VAE().double()
        original = copy.deepcopy(model)
        optimizer = torch.optim.Adam(original.parameters(), lr=1e-3)
        alone = whole(get_batch, 7, 5)
        for data in alone:
            assert alone.current is not None
            optimizer.zero_grad()
            keys = alone.streams.noise_rows(alone.current, alone.current.parts[0])
            with ExampleDraws(keys, lambda call, number: call.plain()):
                recon_batch, mu, logvar = original(data)
            (elbo(recon_batch, data, mu, logvar) / 7).backward()
            optimizer.step()

        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        for data in run.batches(get_batch, global_batch=7, steps=5, micro_batch=micro_batch):
            recon_batch, mu, logvar = model(data)
            run.backward(total=elbo(recon_batch, data, mu, logvar), count=len(data))
            run.step(optimizer)
        return distance(model, original)


JOBS: dict[str, Callable[..., float]] = {
    "nanogpt": nanogpt,
    "reinforce": reinforce,
    "word_language_model": word_language_model,
    "vae": vae,
}


def distances(strategy: str, *micro_batches: str) -> dict[str, float]:
    """Of all jobs, on the ranks of this process group. 0: no micro_batch."""
    found = {}
    for name, job in JOBS.items():
        for micro in map(int, micro_batches):
            found[f"{name}, micro_batch={micro}"] = job(micro_batch=micro or None, strategy=strategy)
    return found


def sharded(strategy: str) -> float:
    return nanogpt(micro_batch=2, strategy=strategy)
