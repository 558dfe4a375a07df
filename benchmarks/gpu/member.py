"""A rank for any launcher: trains a perceptron under ddp, and records its device.

    python -m benchmarks.gpu.member --json FILE [--device cpu] [--fail-at STEP]

Writes {"pid", "rank", "device", "card", "backends"} to FILE.RANK, and at the end "digest", a hash of its weights. With
--fail-at, rank 1 raises in that step, after it has written the time as "raised".
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import jobs
from benchmarks.gpu.ranks import digest

import paceline
from paceline.comm import process_group
from paceline.comm.mesh import world_group

PLANTED = "planted: rank 1 fails"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", help="that of the rank's place, if not given")
    parser.add_argument("--fail-at", type=int)
    args = parser.parse_args()
    run = paceline.start(strategy="ddp", device=args.device, progress="off", tf32=False)
    told: dict[str, Any] = {"pid": os.getpid(), "rank": run.rank, "device": str(run.device)}
    told["card"] = process_group.card(run.device) if run.device.type == "cuda" else None
    told["backends"] = world_group().backends

    def write() -> None:
        args.json.with_name(f"{args.json.name}.{run.rank}").write_text(json.dumps(told))

    def fail(step: int, models: jobs.Models) -> None:
        if run.rank == 1 and step == args.fail_at:
            told["raised"] = time.time()
            write()
            raise RuntimeError(PLANTED)

    write()
    models, _, _ = jobs.ours(run, jobs.MLP, jobs.Way(), fail)
    told["digest"] = digest(jobs.weights(models))
    write()
    run.close()


if __name__ == "__main__":
    main()
