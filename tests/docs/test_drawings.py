"""The drawings are what docs/drawings.py makes, their words do not overlap, and every strategy's page shows its own."""

from __future__ import annotations

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "drawings.py"))
DRAWINGS: dict[str, Any] = SCRIPT["DRAWINGS"]
SHOWN = {"overview": "index", "ring_and_server": "strategies/which"}  # all others on the page of their name


def page_of(name: str) -> Path:
    return DOCS / f"{SHOWN.get(name, f'strategies/{name}')}.md"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_committed_drawing_is_what_the_script_makes(name: str) -> None:
    made = DRAWINGS[name]().svg()
    assert (SCRIPT["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8") == made, "run python docs/drawings.py"
    root = ElementTree.fromstring(made)
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"


def test_every_page_of_a_strategy_has_its_drawing_with_a_description() -> None:
    pages = {page.stem for page in (DOCS / "strategies").glob("*.md")} - {"which", "write"}
    assert pages == DRAWINGS.keys() - SHOWN.keys()
    for name in DRAWINGS:
        page = page_of(name)
        shown = re.findall(rf"!\[([^\]]*)\]\([\w./]*img/strategies/{name}\.svg\)", page.read_text(encoding="utf-8"))
        assert len(shown) == 1, f"{page.name} shows {name}.svg {len(shown)} times"
        assert len(shown[0]) > 40, "the alternative text says what is drawn"


def test_every_committed_drawing_is_one_of_the_scripts() -> None:
    assert {file.stem for file in SCRIPT["FOLDER"].glob("*.svg")} == set(DRAWINGS)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Path:
    """HyperparameterSource modules import each other by their own names."""
    folder = DOCS.parent / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("name", ["small_gpt", "large_batch", "finetune_lora"])
def test_a_curve_is_that_of_its_file(name: str, benchmarks: Path) -> None:
    made = runpy.run_path(str(benchmarks / "charts.py"))[name]()
    assert (DOCS / "img" / f"{name}.svg").read_text(encoding="utf-8") == made, "run python benchmarks/charts.py"


def test_the_picture_of_the_first_page_is_that_of_its_file(benchmarks: Path) -> None:
    made = runpy.run_path(str(benchmarks / "drift.py"))["drift"]()
    assert (DOCS / "img" / "drift.svg").read_text(encoding="utf-8") == made, "run python benchmarks/drift.py --draw"


@pytest.mark.parametrize("name", ["digits", "gan", "nanogpt"])
def test_the_losses_of_an_example_are_those_of_its_file(name: str, benchmarks: Path, tmp_path: Path) -> None:
    script = runpy.run_path(str(benchmarks / "all_examples.py"))
    document = json.loads((benchmarks / "results" / "examples.json").read_text(encoding="utf-8"))
    script["draw"].__globals__["IMAGES"] = tmp_path
    script["draw"](document, [name])
    made = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert (DOCS / "img" / f"{name}.svg").read_text(encoding="utf-8") == made, f"run all_examples.py --draw {name}"
