"""The training data of a detector: mosaics, mirrored and cropped images, and batches of several sizes.

All random numbers are the same on any number of processes and workers. In `__getitem__` Paceline seeds torch by (seed,
epoch, example). The size of a batch is drawn with `random` in the collate function, where Paceline seeds that generator
by (seed, epoch, step): all shards and micro-batches of a global batch get the same size.
"""

from __future__ import annotations

import random

import torch
from detect_boxes import area
from detect_data import Images
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

Example = tuple[Tensor, Tensor]  # uint8 (3, height, width); (boxes, 5): class, left, top, right, bottom on the canvas
Batch = tuple[Tensor, list[Tensor]]  # floats (images, 3, height, width); the boxes of each image
SCALES = 0.875, 1.0, 1.125
LEFT_OF = 0.3  # boxes with less than this fraction left in the crop are dropped


class Detections(Dataset[Example]):
    """The images on the canvas. mosaic: the fraction of images to make mosaics; then all are cropped and mirrored."""

    def __init__(self, images: Images, mosaic: float | None = None) -> None:
        self.images, self.mosaic = images, mosaic
        self.boxes = []
        for boxes, box in zip(images.boxes, images.letterboxes):
            shift = torch.tensor([box.left, box.top, box.left, box.top])
            self.boxes.append(torch.cat([boxes[:, :1], boxes[:, 1:] * box.scale + shift], dim=1))

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Example:
        if self.mosaic is None:
            return self.images.pixels[index], self.boxes[index]
        _, height, width = self.images.pixels[index].shape
        if torch.rand(()) < self.mosaic:  # four images, around a point near the middle
            share = torch.empty(2).uniform_(0.35, 0.65).tolist()
            across, down = round(width * share[0]), round(height * share[1])
            others = torch.randint(len(self), (3,)).tolist()
            corners = [(0, 0), (across, 0), (0, down), (across, down)]
            sizes = [(across, down), (width - across, down), (across, height - down), (width - across, height - down)]
        else:
            others, corners, sizes = [], [(0, 0)], [(width, height)]
        whole, kept = torch.empty_like(self.images.pixels[index]), []
        for number, (left, top), size in zip([index, *others], corners, sizes):
            pixels, boxes = self.cut(number, *size)
            whole[:, top : top + size[1], left : left + size[0]] = pixels
            kept.append(boxes + torch.tensor([0, left, top, left, top]))
        boxes = torch.cat(kept)
        for axis, length in ((1, width), (2, height)):
            if torch.rand(()) < 0.5:
                whole, boxes = whole.flip(3 - axis), mirrored(boxes, axis, length)
        return whole, boxes

    def cut(self, index: int, width: int, height: int) -> Example:
        """A random crop of an image that fills width x height, scaled by a factor between 1 / 1.4 and 1.4."""
        pixels, boxes = self.images.pixels[index], self.boxes[index]
        least = max(width / pixels.shape[2], height / pixels.shape[1], 1 / 1.4)
        scale = least + (1.4 - least) * float(torch.rand(())) if least < 1.4 else least
        piece_height, piece_width = (
            min(round(to / scale), most) for to, most in zip((height, width), pixels.shape[1:])
        )
        left = int(torch.randint(pixels.shape[2] - piece_width + 1, ()))
        top = int(torch.randint(pixels.shape[1] - piece_height + 1, ()))
        piece = pixels[None, :, top : top + piece_height, left : left + piece_width].float()
        image = F.interpolate(piece, (height, width), mode="bilinear", align_corners=False)[0]
        across, down = width / piece_width, height / piece_height
        moved = (boxes[:, 1:] - torch.tensor([left, top, left, top])) * torch.tensor([across, down, across, down])
        clipped = moved.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
        kept = area(clipped) > LEFT_OF * area(moved)
        return image.round().to(torch.uint8), torch.cat([boxes[:, :1], clipped], dim=1)[kept]


def mirrored(boxes: Tensor, axis: int, length: int) -> Tensor:
    """axis: 1 for left and right, 2 for top and bottom; they are columns `axis` and `axis + 2`."""
    turned = boxes.clone()
    turned[:, axis], turned[:, axis + 2] = length - boxes[:, axis + 2], length - boxes[:, axis]
    return turned


def collate(examples: list[Example]) -> Batch:
    """Images from 0 to 1; boxes as a list, since their number differs between images."""
    images, boxes = zip(*examples)
    return torch.stack(images).to(torch.get_default_dtype()) / 255, list(boxes)


def collate_scaled(examples: list[Example]) -> Batch:
    """The same, at one of SCALES, drawn once per global batch."""
    images, boxes = collate(examples)
    scale = random.choice(SCALES)
    height, width = (round(side * scale / 8) * 8 for side in images.shape[2:])
    factors = torch.tensor([1, width / images.shape[3], height / images.shape[2]])[[0, 1, 2, 1, 2]]
    return F.interpolate(images, (height, width), mode="bilinear", align_corners=False), [b * factors for b in boxes]
