"""Does transformers.Trainer give a classifier the gradient of one process? Without paceline.

    python benchmarks/silentdist/truth/trainer_scale.py

Prints the norm of the first gradient, of 1 and of 2 processes with the same 32 examples, without dropout. Trainer
multiplies the loss by the number of processes (average_tokens_across_devices) if the model's forward takes **kwargs:
then the loss is expected to be a sum over tokens, divided by their number on all ranks. BertForSequenceClassification
takes **kwargs, and computes a mean.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "corpus" / "plain" / "trainer_scales_classifier.py"


def train() -> None:
    import runpy

    import torch
    import transformers

    found = {}

    class Norm(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            found["norm"] = float(torch.stack(grads).norm())

    original = transformers.Trainer.__init__

    def init(trainer, *args, **options):
        options["args"].per_device_train_batch_size = 16 // int(os.environ.get("WORLD_SIZE", "1"))
        options["args"].max_steps, options["args"].max_grad_norm = 1, 0.0
        for module in options["model"].modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        original(trainer, *args, **options)
        trainer.add_callback(Norm())

    transformers.Trainer.__init__ = init
    torch.manual_seed(0)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        print("NORM", json.dumps(found["norm"]), transformers.__version__)


def main() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for processes, start in ((1, [sys.executable]), (2, torchrun)):
        with tempfile.TemporaryDirectory() as folder:
            line = [*start, __file__, "--train"]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300)
        print(f"{processes} processes:", *[row for row in done.stdout.splitlines() if row.startswith("NORM")])
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])


if __name__ == "__main__":
    train() if sys.argv[1:] == ["--train"] else main()
