"""A YOLO-style detector of blood cells, trained from scratch, on one process or on several.

    python examples/detect.py --data bccd.zip --export detector.safetensors --picture cells.jpg
    paceline run --nproc 2 examples/detect.py --data bccd.zip --checkpoints checkpoints/
    python examples/detect.py --data bccd.zip --evaluate detector.safetensors

Its modules: the data (detect_voc.py, detect_data.py), mosaics and batches of several sizes (detect_mosaic.py), the
network (detect_model.py, detect_boxes.py), the loss (detect_loss.py), COCO's mean average precision (detect_scores.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from detect_boxes import detect
from detect_data import check_classes, load, load_weights
from detect_loss import loss_fn
from detect_model import Detector, average, decay_groups
from detect_mosaic import Detections, collate, collate_scaled
from detect_scores import average_precision, draw, in_pixels
from detect_voc import DataError
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel

import paceline

CACHE = Path("~/.cache/detect").expanduser()


def size(text: str) -> tuple[int, int]:
    width, height = (int(side) for side in text.split("x"))
    return width, height


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a detector.")
    parser.add_argument("--data", type=Path, default="data/bccd.zip", help="a zip in the layout of Pascal VOC")
    parser.add_argument("--classes", nargs="+", default=["RBC", "WBC", "Platelets"])
    parser.add_argument("--train-list", default="trainval")
    parser.add_argument("--test-list", default="test")
    parser.add_argument("--cache", type=Path, default=CACHE, help="keep decoded images in this folder")
    parser.add_argument("--size", type=size, default="256x192", help="size of the canvas that images are scaled to")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=16, help="images per step, over all processes")
    parser.add_argument("--workers", type=int, default=0, help="loader workers per process, which make mosaics")
    parser.add_argument("--width", type=int, default=16, help="channels after the first convolution")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=20, help="evaluate and save every so many epochs")
    parser.add_argument("--checkpoints", type=Path, help="a folder: resume from its newest checkpoint, and save there")
    parser.add_argument("--export", type=Path, help="write the averaged weights to this file")
    parser.add_argument("--evaluate", type=Path, help="do not train; evaluate the weights in this file")
    parser.add_argument("--picture", type=Path, help="draw six test images with the detected boxes")
    options = parser.parse_args()

    run = paceline.start(seed=0)
    try:
        with run.main_first():  # one process per machine decodes the images; the others read them
            train_images, test_images = (
                load(options.data, part, options.classes, options.size, options.cache)
                for part in (options.train_list, options.test_list)
            )
        check_classes(train_images, options.data)
        model = Detector(len(options.classes), options.width)
        if options.evaluate:
            load_weights(model, options.evaluate)
    except DataError as error:
        parser.error(str(error))
    test = Detections(test_images)

    def report(what: str, scored: nn.Module) -> None:
        # One image at a time, so that scores are the same to the last bit on any number of processes.
        one_each: dict[str, Any] = {"global_batch": run.world_size, "micro_batch": 1, "collate_fn": collate}
        found = run.predict(scored, test, fn=lambda model, batch: detect(model, batch[0]), **one_each)
        scores = average_precision(in_pixels(found, test_images), test_images) if run.main else {}
        run.print(what + ": " + ", ".join(f"{name} {score:.4f}" for name, score in run.broadcast(scores).items()))
        if options.picture and run.main:
            draw(options.picture, found[:6], test_images)

    if options.evaluate:
        report(str(options.evaluate), run.prepare(model))
        return
    how: dict[str, Any] = {"shuffle": True, "num_workers": options.workers, "collate_fn": collate_scaled}
    train = run.loader(Detections(train_images, mosaic=0.5), global_batch=options.global_batch, **how)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.02), lr=options.lr)
    steps = options.epochs * train.steps
    first = max(steps // 20, 1)
    schedule = paceline.warmup(optimizer, first, then=CosineAnnealingLR(optimizer, max(steps - first, 1)))
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    averaged = AveragedModel(model, avg_fn=average, use_buffers=True)
    run.track(averaged=averaged)
    if options.checkpoints and run.restore(options.checkpoints, missing_ok=True):
        run.print(f"resumed after step {run.steps}")
    for epoch in run.epochs(options.epochs):
        for batch in train:
            run.forward_backward(loss_fn, model, batch)
            if run.step(optimizer, max_grad_norm=10.0):
                averaged.update_parameters(model)
        if (epoch + 1) % options.every == 0 or epoch + 1 == options.epochs:
            report(f"epoch {epoch + 1}", averaged.module)
            if options.checkpoints:
                run.save(options.checkpoints, keep=2)
    if options.export:
        model.load_state_dict(averaged.module.state_dict())
        run.export(options.export)


if __name__ == "__main__":
    main()
