"""Does transformers.Trainer give a classifier the gradient of one process? Without paceline.

    python benchmarks/silentdist/truth/trainer_scale.py

Writes the norm of the first gradient of 1 and of 2 processes, with the same 32 examples and without dropout, into
results/trainer_scale.json. If the model's forward takes **kwargs, Trainer expects the loss to be a sum over tokens,
divided by their number on all ranks. So it multiplies the loss by the number of processes
(average_tokens_across_devices). BertForSequenceClassification takes **kwargs, and computes a mean.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from collate_draws import machine

RESULTS = Path(__file__).parents[2] / "results" / "trainer_scale.json"
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
        print("FOUND", json.dumps([found["norm"], transformers.__version__]))


def main() -> None:
    norms: dict[str, float] = {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for processes, start in (("1 process", [sys.executable]), ("2 processes", torchrun)):
        with tempfile.TemporaryDirectory() as folder:
            line = [*start, __file__, "--train"]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        norms[processes], version = json.loads(re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE)[0])
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "transformers": version,
        "norm of the first gradient": norms,
        "times": round(norms["2 processes"] / norms["1 process"], 6),
    }
    print(json.dumps(result, indent=1))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["--train"] else main()
