"""The models, with their data, order, batch and optimizer.

In step k every contender uses the same global batch, number k % BATCHES; process r of n has the r-th of n equal parts.
Batches are in memory, so no data loading is measured (benchmarks/data_path.py does that).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
BATCHES = 8
Data = tuple[Tensor, Tensor]


class NoData(Exception):
    """A model cannot be trained here; the message has the reason."""


@dataclass(frozen=True)
class Sources:
    """Paths of external data."""

    cifar10: Path
    text: Path


@dataclass(frozen=True)
class Model:
    about: str  # in words
    make: Callable[[], nn.Module]
    data: Callable[[int, Sources], Data]  # (number of examples, sources) -> inputs, targets. Raises NoData
    global_batch: int
    optimizer: str  # of OPTIMIZERS
    batch_norm: bool = False  # whether it has batch norm, with statistics over the global batch or over a shard
    # Whether it has convolutions over images. With torch their weights and inputs are then channels_last, as torch's
    # tuning guide recommends, and as TensorFlow always stores them.
    images: bool = False
    # The allowed relative difference of the first losses: other libraries add in another order, and Adam amplifies it.
    tolerance: float = 2e-3


def loss_fn(model: nn.Module, batch: Data | list[Tensor]) -> Tensor:
    """The mean over examples or tokens. The model returns (batch, classes) or (batch, tokens, vocabulary)."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-4, fused=True),
}


def perceptron() -> nn.Module:
    sizes = [784, 2800, 2800, 2800, 2800]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def convolutions(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(after)] if norm else [])]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Residual(nn.Module):
    """`layers` small layers, each added to its input: (batch, width) -> (batch, 10)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.02 * torch.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def _examples() -> None:
    """Make the modules of examples/ importable."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))


LENGTH, VOCABULARY = 64, 65  # of a piece of text; of tinyshakespeare


def gpt() -> nn.Module:
    _examples()
    from nanogpt import GPT

    return GPT(VOCABULARY, LENGTH, layers=4, width=128)


def mobilenet() -> nn.Module:
    _examples()
    from cifar10_mobilenetv2 import mobilenet_v2

    return mobilenet_v2(0.25)


def noise(*shape: int) -> Callable[[int, Sources], Data]:
    def data(count: int, _: Sources) -> Data:
        draw = torch.Generator().manual_seed(1)
        return torch.randn(count, *shape, generator=draw), torch.randint(10, (count,), generator=draw)

    return data


def cifar10(count: int, sources: Sources) -> Data:
    _examples()
    from cifar10_data import DEVIATION, MEAN, DataError, load

    try:
        train, _ = load(sources.cifar10, count)
    except DataError as error:
        raise NoData(f"{error} (make bench CIFAR10=FILE)") from None
    images = ((train.images / 255) - MEAN) / DEVIATION
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))  # the zip is sorted by class
    return images.permute(0, 3, 1, 2)[order].contiguous(), train.labels[order]


def text(count: int, sources: Sources) -> Data:
    _examples()
    from characters import DataError, characters

    try:
        alphabet, tokens = characters(sources.text, LENGTH)
    except DataError as error:
        raise NoData(f"{error} (make bench TEXT=FILE)") from None
    if len(alphabet) > VOCABULARY:
        raise NoData(f"{sources.text} has {len(alphabet)} characters, and tinyshakespeare has {VOCABULARY}")
    places = torch.randint(len(tokens) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(1))
    places = places + torch.arange(LENGTH)
    return tokens[places], tokens[places + 1]


MODELS = {
    "mlp": Model("a perceptron of 25.8 million parameters", perceptron, noise(784), 128, "adam"),
    "conv": Model("three convolutions on CIFAR-10", lambda: convolutions(False), cifar10, 64, "sgd", images=True),
    "conv_bn": Model(
        "three convolutions with batch norm on CIFAR-10",
        lambda: convolutions(True),
        cifar10,
        64,
        "sgd",
        batch_norm=True,
        images=True,
    ),
    "gpt": Model("a GPT of 4 layers of 128 on characters of Shakespeare", gpt, text, 32, "adam"),
    "mobilenet": Model(
        "MobileNetV2 of width 0.25 on CIFAR-10",
        mobilenet,
        cifar10,
        64,
        "sgd",
        batch_norm=True,
        images=True,
        # 52 batch norms over a batch of small features: the fourth loss of one plain process is 2.3277 in float32 and
        # 2.3331 in float64, 2.3229 with channels_last, and with two threads another one again.
        tolerance=2e-2,
    ),
    "layers": Model("300 small layers", lambda: Residual(300, 16), noise(16), 64, "sgd"),
}


def started(model: Model) -> nn.Module:
    """The model with the initial weights of all contenders."""
    torch.manual_seed(0)
    network = model.make()
    return network.to(memory_format=torch.channels_last) if model.images else network  # type: ignore[call-overload]
