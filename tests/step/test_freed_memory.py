"""A run on a CPU keeps freed memory, so that a step faults no pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from paceline.step.freed_memory import CHOSEN

SCRIPT = """
import resource
import torch
import paceline

paceline.start(device="cpu", progress="off")


def step():
    held = [torch.ones(2**21) for _ in range(10)]  # 80 MB


for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""
PAGES = 10 * 2**23 / 4096  # of a step


def faults(**variables: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN} | variables
    line = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are limits of glibc's malloc")
def test_steps_of_a_run_fault_no_pages() -> None:
    assert faults() < 0.02 * PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are limits of glibc's malloc")
@pytest.mark.parametrize("name", CHOSEN[:2])
def test_a_choice_of_the_user_is_kept(name: str) -> None:
    """With either variable, blocks above 128 KB are mapped anew each time."""
    assert faults(**{name: "131072"}) > 0.9 * PAGES
