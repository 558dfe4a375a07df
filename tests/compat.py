"""The tests with the oldest Python and torch that pyproject.toml claims, and with the newest that were tried.

    python -m tests.compat oldest newest      (make compat)

Each has an environment of its own under build/compat/, made at the first time: torch, what Paceline needs, pytest. It
runs unit tests and tests on two processes, within ten minutes on two cores. A Python that is not found is replaced by
the one at hand, and that is said: then only torch's version is tested.

Whence torch comes is pip's own configuration. Where that knows no builds for CPUs, each environment takes some 6 GB.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compat"
TOOLS = (
    "hypothesis",
    "plotly",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "scikit-learn",
    "tensorboard",
    "torchmetrics",
)
TESTS = (
    "tests/test_torch_private.py", "tests/test_public_api.py", "tests/test_config.py", "tests/comm", "tests/strategies",
    "tests/data", "tests/step", "tests/norm", "tests/state", "tests/metrics",
    "tests/fit", "tests/monitor", "tests/launcher",
)  # fmt: skip
LEFT_OUT = (  # they measure the memory and the time of one build of torch
    "tests/strategies/test_fsdp.py::test_memory_per_rank_is_that_of_the_formula",
)
MOST_SECONDS = 600.0


def claimed(which: str) -> tuple[str, str]:
    """(Python, torch), as 3.10 and 2.13: the oldest that the package asks for, or the newest that it says it knows."""
    project = (ROOT / "pyproject.toml").read_text()
    support = (ROOT / "src" / "paceline" / "torch_private" / "support.py").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    oldest = re.search(r'^requires-python = ">=(3\.\d+)"', project, re.M)
    torchs = re.search(r'^OLDEST, NEWEST = "([\d.]+)", "([\d.]+)"', support, re.M)
    assert oldest is not None
    assert torchs is not None
    if which == "oldest":
        return oldest[1], torchs[1]
    return max(pythons, key=lambda version: int(version.split(".")[1])), torchs[2]


def interpreter(version: str) -> str:
    """The path of this Python, also where pyenv has it; else of the one that runs this."""
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    if shutil.which(command[0]) is not None:
        environ = os.environ | {"PYENV_VERSION": version}
        found = subprocess.run(command, capture_output=True, text=True, env=environ)
        if found.returncode == 0:
            return found.stdout.strip()
    own = ".".join(map(str, sys.version_info[:2]))
    print(f"compat: there is no python{version}, so that this tests Python {own}, and says nothing of {version}")
    return sys.executable


def environment(python: str, torch: str) -> Path:
    """Its interpreter. Of the oldest torch it has the first release, of the newest the last; all else as it comes."""
    tag = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    folder = FOLDER / f"python{tag}-torch{torch}"
    own, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists() or ready.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        print(f"compat: making {folder.relative_to(ROOT)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        release = f"torch=={torch}.*" if torch == claimed("newest")[1] else f"torch=={torch}.0"
        subprocess.run([*install, release, *TOOLS, "-e", str(ROOT)], check=True)
        ready.touch()
    return own


def run(which: str) -> bool:
    version, torch = claimed(which)
    python = environment(interpreter(version), torch)
    told = "import sys, torch; print('Python %d.%d.%d' % sys.version_info[:3] + ', torch ' + torch.__version__)"
    versions = subprocess.run([str(python), "-c", told], capture_output=True, text=True, check=True).stdout.strip()
    print(f"compat: {which}: {versions}", flush=True)
    command = [
        *(str(python), "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile"),
        *("-p", "no:cacheprovider", "-m", "not conformance and not full and not campaign and not system", *TESTS),
        *(f"--deselect={test}" for test in LEFT_OUT),
    ]
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT).returncode
    seconds = time.monotonic() - began
    late = seconds > MOST_SECONDS
    print(
        f"compat: {which}: {versions}: {'passed' if code == 0 else 'FAILED'} in {seconds:.0f} s"
        + (f", more than {MOST_SECONDS:.0f}: choose fewer tests in tests/compat.py" if late else ""),
        flush=True,
    )
    return code == 0


if __name__ == "__main__":
    wrong = [which for which in sys.argv[1:] if which not in ("oldest", "newest")]
    if wrong:
        sys.exit(f"compat: {' '.join(wrong)}: what fits is oldest, newest or both")
    passed = [run(which) for which in sys.argv[1:] or ("oldest", "newest")]
    sys.exit(0 if all(passed) else 1)
