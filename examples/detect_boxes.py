"""Box arithmetic, and the conversion of a detector's output to boxes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STRIDES = 8, 16, 32  # of the detector's three scales, in pixels
CANDIDATES = 300  # boxes per image before overlapping boxes are removed


def area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def cells(images: Tensor) -> tuple[Tensor, Tensor]:
    """(cells, 2): the centres of all cells, in pixels; (cells, 1): their strides."""
    centres, strides, (height, width) = [], [], images.shape[2:]
    for stride in STRIDES:
        height_cells, width_cells = -(-height // stride), -(-width // stride)
        down, across = torch.meshgrid(torch.arange(height_cells), torch.arange(width_cells), indexing="ij")
        centres.append((torch.stack([across, down], dim=2).reshape(-1, 2) + 0.5) * stride)
        strides.append(torch.full((height_cells * width_cells, 1), float(stride)))
    return torch.cat(centres).to(images), torch.cat(strides).to(images)


def corners(found: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """(..., cells, 4): left, top, right, bottom of each cell's box, in pixels."""
    distances = found[..., :4].clamp(max=6).exp() * strides
    return torch.cat([centres - distances[..., :2], centres + distances[..., 2:]], dim=-1)


def overlap(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes (..., 4), and its generalised form (Rezatofighi et al. 2019, "GIoU")."""
    shared = (torch.minimum(one, other)[..., 2:] - torch.maximum(one, other)[..., :2]).clamp(min=0).prod(-1)
    around = (torch.maximum(one, other)[..., 2:] - torch.minimum(one, other)[..., :2]).prod(-1)
    union = (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1) - shared
    iou = shared / union
    return iou, iou - (around - union) / around


@torch.no_grad()
def detect(model: nn.Module, images: Tensor, least: float = 0.05, most_overlap: float = 0.6) -> list[Tensor]:
    """For each image (boxes, 6): left, top, right, bottom, score, class; the highest score first. If two boxes of a
    class overlap by more than `most_overlap`, the box with the lower score is removed."""
    found = model(images)
    boxes, scores = corners(found, *cells(images)), found[..., 4:].sigmoid()
    results = []
    for box, score in zip(boxes, scores):
        order = score.flatten().argsort(descending=True, stable=True)[:CANDIDATES]
        order = order[score.flatten()[order] > least]
        label, its = order % score.shape[1], box[order // score.shape[1]]
        same = label[:, None] == label
        rival = (overlap(its[:, None], its)[0] > most_overlap) & same
        kept: list[int] = []
        for number in range(len(order)):
            if not rival[number, kept].any():
                kept.append(number)
        rows = torch.cat([its, score.flatten()[order, None], label[:, None].to(its)], dim=1)
        results.append(rows[kept].to(torch.float64))
    return results
