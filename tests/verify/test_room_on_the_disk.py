"""What lies on the disk is little more than the run's own states: large tensors are compared by sketches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.verify.prepared import Prepared

from paceline.verify.answer import SAME
from paceline.verify.decision import decide


@pytest.mark.full
def test_the_disk_holds_sixteen_bytes_a_parameter_and_step(tmp_path: Path) -> None:
    """Of fp32 and Adam: weights and two averages, and the gradient. It was 53."""
    steps, parameters = 4, 2 * 64 * 8192 + 8192 + 64
    runs = Prepared(tmp_path, ("", ""), 2, None, "fp32", steps, Path(__file__).with_name("large.py"))
    assert decide(runs).code == SAME
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert held / parameters / steps < 17


@pytest.mark.full
def test_where_the_disk_has_no_room_for_more_steps_fewer_are_compared_and_that_is_said(tmp_path: Path) -> None:
    """A million parameters with Adam are 13 MB a step, and 4 MB of gradients."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a disk of that size")
    try:
        runs = Prepared(disk, ("", ""), 2, None, "fp32", 4, Path(__file__).with_name("large.py"))
        answer = decide(runs)
        assert answer.code == SAME, answer.text
        assert 2 <= answer.steps < 4
        assert any(f"only {answer.steps} steps were compared" in note.text for note in answer.notes)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
