"""The loss of a detector: assigns boxes to cells, and measures the error of each cell.

A box belongs to the scale of its size, and there to the cells inside the box with centres at most 1.5 strides from the
box's centre. If several boxes match, a cell gets the smallest (Tian et al. 2019, "FCOS", sections 3.2 and 4.2). The
assignment does not depend on the predictions. Scores learn the overlap with the box (Li et al. 2020, "Generalized Focal
Loss", equation 5), corners learn GIoU.

The loss is a mean over the cells with a box. Their number differs between images, so loss_fn returns the sum and the
count, and Paceline divides by the count of the global batch. (A global batch without boxes changes nothing.)
"""

from __future__ import annotations

import torch
from detect_boxes import STRIDES, area, cells, corners, overlap
from detect_mosaic import Batch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

RADIUS = 1.5  # in strides
LARGEST = 8  # the longest box of a scale, in strides; the last scale has no limit
CORNERS = 2.0  # the weight of GIoU


def assign(boxes: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """(cells,): the number of each cell's box, or -1. boxes: (boxes, 5)."""
    if not len(boxes):
        return torch.full((len(centres),), -1, device=centres.device)
    sides, middle = boxes[:, 3:] - boxes[:, 1:3], (boxes[:, 1:3] + boxes[:, 3:]) / 2
    longest = sides.amax(1) / strides  # (cells, boxes), in strides
    least, most = LARGEST / 2 * (strides > STRIDES[0]), torch.where(strides < STRIDES[-1], float(LARGEST), torch.inf)
    away = (centres[:, None] - middle).abs()
    near = (away < torch.minimum(RADIUS * strides[:, None], sides / 2)).all(2)
    areas = torch.where(near & (longest >= least) & (longest < most), area(boxes[:, 1:]), torch.inf)
    smallest, number = areas.min(1)
    return torch.where(smallest < torch.inf, number, -1)


def loss_fn(model: nn.Module, batch: Batch) -> paceline.Total:
    images, boxes = batch
    found = model(images)
    centres, strides = cells(images)
    wanted = found.new_zeros(*found.shape[:2], 5)  # each cell's box
    has_box = torch.zeros(found.shape[:2], dtype=torch.bool, device=found.device)
    for number, its in enumerate(boxes):
        its = its.to(found.dtype)
        box = assign(its, centres, strides)
        has_box[number] = box >= 0
        wanted[number, box >= 0] = its[box[box >= 0]]
    labels, targets = wanted[has_box][:, 0].long(), wanted[has_box][:, 1:]
    iou, giou = overlap(corners(found, centres, strides)[has_box], targets)
    logits = found[..., 4:]
    quality = torch.zeros_like(logits)
    quality[has_box] = F.one_hot(labels, logits.shape[2]) * iou.detach().to(logits.dtype)[:, None]
    entropy = F.binary_cross_entropy_with_logits(logits, quality, reduction="none")
    scores = (logits.sigmoid() - quality).abs().square() * entropy
    return paceline.Total(scores.sum() + CORNERS * (1 - giou).sum(), has_box.sum())
