"""Draw charts of figures that runs report every few steps, from their JSON files.

    python benchmarks/charts.py            # docs/img/small_gpt.svg, large_batch.svg, finetune_lora.svg

curves.py draws loss curves, with a number for each step.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from curves import chart
from huggingface import RESULTS, ROOT

IMAGES = ROOT / "docs" / "img"


def small_gpt() -> str:
    held_out: dict[str, float] = json.loads((RESULTS / "small_gpt.json").read_text())["held_out_loss"]
    points = [(float(step), loss) for step, loss in held_out.items()]
    title, up = "nanogpt.py: 4 layers of 128", "held-out loss, nats a character"
    return chart({"1 process": points}, title, "step", up, 0.25)


def large_batch() -> str:
    found: dict[str, dict[str, Any]] = json.loads((RESULTS / "large_batch.json").read_text())["accuracy_by_epoch"]
    smallest = min(found, key=int)
    curves: dict[str, list[tuple[float, float]]] = {}
    for batch, kinds in found.items():
        for kind, scores in kinds.items():
            seeds = list(scores.values()) if isinstance(scores, dict) else [scores]
            medians = [statistics.median(values) for values in zip(*seeds, strict=True)]
            name = batch if batch == smallest else f"{batch}, {kind}"
            curves[name] = [(float(epoch), value) for epoch, value in enumerate(medians, 1)]
    return chart(curves, "resnet_large_batch.py, by the global batch", "epoch", "test accuracy", 0.05)


def finetune_lora() -> str:
    runs: dict[str, dict[str, Any]] = json.loads((RESULTS / "huggingface_lora.json").read_text())["runs"]
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, run in runs.items():
        alike.setdefault(tuple(run["accuracy"]), []).append(name)
    curves = {"; ".join(names): [(float(n), v) for n, v in enumerate(line, 1)] for line, names in alike.items()}
    title = "finetune_lora.py, by processes and strategy" + f": {next(iter(curves))}" * (len(curves) == 1)
    return chart(curves, title, "epoch", "test accuracy", 0.05)


def main() -> None:
    for draw in (small_gpt, large_batch, finetune_lora):
        (IMAGES / f"{draw.__name__}.svg").write_text(draw())


if __name__ == "__main__":
    main()
