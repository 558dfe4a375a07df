"""docs/widths.py sees what is wider than its column, in a real browser."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "widths.py"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGE = (
    '<!doctype html><body><div style="width:600px"><pre><code style="display:block;overflow:auto">{}</code></pre></div>'
)


@pytest.mark.conformance
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_block_that_scrolls_sideways_is_named(tmp_path: Path) -> None:
    for name, code in (("narrow", "x = 1"), ("wide", "x" * 400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(PAGE.format(code))
    found = SCRIPT["too_wide"](tmp_path, CHROMIUM, 1280, 800, seconds=100)
    assert found["/narrow/index.html"] == []
    (wide,) = found["/wide/index.html"]
    assert wide.startswith("CODE ")
    assert "> 600: xxx" in wide
