"""What docs/detection.md says of YOLOv5's batch and loss under Paceline: targets of all images in one tensor, with the
number of the image in its first column, and a mean over targets that is multiplied by the number of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import paceline

COUNTS = [3, 0, 1, 5, 2, 1, 4]  # targets of each image
Batch = tuple[Tensor, Tensor, tuple[str, ...]]


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(COUNTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(5, generator=draw, dtype=torch.float64)
        return image, torch.rand(COUNTS[index], 6, generator=draw, dtype=torch.float64), f"{index}.jpg"


def collate(examples: list[tuple[Tensor, Tensor, str]]) -> Batch:
    images, targets, paths = zip(*examples)
    for number, its in enumerate(targets):
        its[:, 0] = number
    return torch.stack(images), torch.cat(targets), paths


def of_targets(model: nn.Module, batch: Batch) -> Tensor:
    """A number for each target: it depends on its own image."""
    images, targets, paths = batch
    assert len(images) == len(paths)
    return (model(images)[targets[:, 0].long()] - targets[:, 2:]).square().sum(1)


def mean_of_shard(model: nn.Module, batch: Batch) -> Tensor:
    losses = of_targets(model, batch)
    return losses.sum() / max(len(losses), 1)


def total(model: nn.Module, batch: Batch) -> paceline.Total:
    losses = of_targets(model, batch)
    return paceline.Total(losses.sum(), len(losses))


def gradient(loss_fn: Callable[..., Any], shards: int, global_batch: int = len(COUNTS)) -> Tensor:
    """Of the first global batch."""
    run = paceline.start(strategy=f"single:shards={shards}", progress="off", seed=0)
    model = nn.Linear(5, 4).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel()) + number).view_as(p))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = run.prepare(model, optimizer)
    loader = run.loader(Images(), global_batch=global_batch, collate_fn=collate)
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        if run.steps == 0 and all(p.grad is not None for p in model.parameters()):
            found = model.weight.grad.clone()
        run.step(optimizer)
    run.close()
    return found


def test_a_total_over_targets_is_the_same_on_any_number_of_shards() -> None:
    whole = gradient(total, 1)
    for shards in (2, 3, 9):  # two of nine are empty, and one has an image without a target
        torch.testing.assert_close(gradient(total, shards), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(mean_of_shard, 1), whole, rtol=1e-12, atol=1e-12)
    assert (gradient(mean_of_shard, 2) - whole).abs().max() > 1e-3 * whole.abs().max()
