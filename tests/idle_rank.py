"""A rank of a team, as the launcher starts it (tests/ranks.py): it says what its environment is, and stays.

    paceline run --nproc N idle_rank.py FOLDER

It imports no torch. What the rank is to run is run by processes with its environment, which tests/rank.py forks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"{rank}.part").write_text(json.dumps(dict(os.environ)))
(folder / f"{rank}.part").rename(folder / f"environ.{rank}")
(folder / "stay").read_bytes()  # a fifo: it ends when pytest's process closes it, or dies
