"""What the processes of the tests beside it run: scripts in Horovod's idiom, in float64."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
DRIVEN = "PACELINE_TEST_HOROVOD"  # JSON: what `drive` is to do


def migrated(folder: str) -> dict[str, dict[str, list[Any]]]:
    """The weights after examples/migrate/horovod_before.py and horovod_after.py, unshuffled and from the same weights,
    and what they printed. The number of processes does not change what they are."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in ("before", "after"):
        source = (EXAMPLES / f"horovod_{name}.py").read_text()
        for old, new in (
            ("shuffle=True", "shuffle=False"),
            ("    model = net", "    torch.manual_seed(1)\n    model = net"),
        ):
            assert source.count(old) == 1, f"{old!r} comes {source.count(old)} times"
            source = source.replace(old, new)
        script = Path(folder, f"{name}{os.environ['RANK']}.py")
        script.write_text(source)
        sys.argv, printed = [str(script), "--epochs", "2"], io.StringIO()
        with contextlib.redirect_stdout(printed):
            model = runpy.run_path(str(script))["main"]()
        found[name] = {"weights": [p.tolist() for p in model.parameters()], "printed": printed.getvalue().splitlines()}
    return found


def drive() -> None:
    """Runs a script of Horovod's, unmodified but for the line that imports it, and leaves its weights in a file.

    In float64, without dropout, whose masks are other ones on another number of processes, and with a seed of its own.
    """
    import paceline.horovod as hvd

    job = json.loads(os.environ[DRIVEN])
    torch.set_default_dtype(torch.float64)
    torch.nn.functional.dropout = torch.nn.functional.dropout2d = lambda x, *args, **options: x  # type: ignore[assignment]
    torch.manual_seed(0)
    made: list[Any] = []
    wrapped = hvd.DistributedOptimizer

    def remember(*args: Any, **options: Any) -> Any:
        made.append(wrapped(*args, **options))
        if job.get("die") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            steps = iter(range(job["die"]))
            made[-1].register_step_post_hook(
                lambda *_: next(steps, None) is None and os.kill(os.getpid(), signal.SIGKILL)
            )
        return made[-1]

    hvd.DistributedOptimizer = remember  # type: ignore[assignment]
    sys.argv = [job["script"], *job["arguments"]]
    script = runpy.run_path(job["script"], run_name="__main__")
    weights = [p.detach() for group in made[-1].param_groups for p in group["params"]]
    if "plain_steps" in job:  # a benchmark, whose batch is the same in each step, and here on each process
        torch.manual_seed(0)
        model = script["models"].resnet50()
        plain = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        batch = torch.randn(2, 3, 224, 224)
        target = torch.LongTensor(2).random_() % 1000
        for _ in range(job["plain_steps"]):
            plain.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), target).backward()
            plain.step()
        for own, other in zip(weights, model.parameters(), strict=True):
            assert (own - other).norm() <= 1e-12 * other.norm()
    torch.save(weights, f"{job['out']}.{hvd.rank()}")


if __name__ == "__main__":
    drive()
