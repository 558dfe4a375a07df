"""What the pages say is so: their Python runs, their links lead somewhere, their commands and settings exist.

The Python blocks of a page run one after the other, as one script, in an empty folder, after the PRELUDE, which holds
what a reader is taken to have: a model, an optimizer, a data set. A block after `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import click
import pytest
from tests.ranks import run_script

from paceline.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<note><!-- not run: [^\n]+ -->\n)?^ *```(?P<kind>\w*)\n(?P<code>.*?)^ *```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
WIDEST = 118
PRELUDE = """
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(192, 8), torch.randint(4, (192,)))
train_set = test_set = dataset
real = torch.randn(64, 8)

def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)

run = paceline.start(progress="off")
run.prepare(model, optimizer)
loader = run.loader(dataset, global_batch=64, shuffle=True, name="prelude")
"""


def blocks(page: Path, kind: str) -> list[str]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    chosen = (match for match in found if match["kind"] == kind and not match["note"])
    return [textwrap.dedent(match["code"]) for match in chosen]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    code = blocks(page, "python")
    if not code:
        return
    for number, block in enumerate(code):
        compile(block, f"{page.name}, block {number + 1}", "exec")
    script = tmp_path / "page.py"
    script.write_text(PRELUDE + "\n" + "\n\n".join(code), encoding="utf-8")
    run_script(script, deadline=100)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "#")):
            continue
        file = (page.parent / target.split("#")[0]).resolve()
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if page.is_relative_to(ROOT / "docs"):
            assert file.is_relative_to(ROOT / "docs"), f"{page.name} links to {target}, which is not part of the site"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^(?: *\$ )?paceline ([a-z]+[^\n#]*)", text, re.M):
        name, *words = line.split()
        assert name in main.commands, f"{page.name}: paceline {name} is no command"
        known = {
            flag for option in main.commands[name].params if isinstance(option, click.Option) for flag in option.opts
        }
        known |= {flag for option in main.commands[name].params for flag in getattr(option, "secondary_opts", ())}
        for word in words:
            if word.endswith(".py") or word in ("-m", "--module"):
                break  # what follows is the script's own
            if word.startswith("-"):
                assert word.split("=")[0] in known, f"{page.name}: paceline {name} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_the_examples_exist(page: Path) -> None:
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        for line in block["code"].replace("\\\n", " ").splitlines():
            found = re.search(r"(examples/[\w/]+\.py)( [^#]*)?", line)
            if found is None:
                continue
            script = ROOT / found[1]
            beside = script.parent.glob("job.py")  # the options that the pairs of migrate/ share
            known = "".join(file.read_text(encoding="utf-8") for file in (script, *beside))
            own = re.findall(r"--[\w-]+", found[2] or "")
            assert [word for word in own if f'"{word}"' not in known] == [], f"{page.name}: {line}"


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("run", "launching"),
        ("submit", "slurm"),
        *((name, name) for name in ("compare", "plan", "verify", "doctor", "export")),
    ],
)
def test_every_option_of_a_command_stands_on_its_page(command: str, page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    if command == "submit":  # passes on what `paceline run` takes
        text += (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    options = [option for option in main.commands[command].params if isinstance(option, click.Option)]
    missing = [option.opts for option in options if not any(f"`{name}" in text for name in option.opts)]
    assert not missing, f"docs/{page}.md lacks {missing}"


def skeleton(text: str) -> dict[str, object]:
    """What a README has in any language: sections, paragraphs of a list, tables, links, names in code, and code itself
    without its comments."""
    prose = FENCE.sub("", text)
    code = (re.sub(r" *#.*", "", line) for block in FENCE.finditer(text) for line in block["code"].splitlines())
    return {
        "sections": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.M)],
        "points": len(re.findall(r"^- ", prose, re.M)),
        "columns": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
        "links": sorted(set(LINK.findall(prose)) - {"README.md", "README.zh-CN.md"}),
        "names": sorted(set(re.findall(r"`[^`\n]+`", prose))),
        "code": list(code),
    }


def test_the_readme_in_chinese_has_what_the_english_one_has() -> None:
    english, chinese = (
        skeleton((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "README.zh-CN.md")
    )
    for part, there in english.items():
        assert chinese[part] == there, part


def test_the_first_screen_of_the_readme_has_the_difference_and_the_commands() -> None:
    """80 columns, 40 lines; a longer line of prose takes several."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    screen = "\n".join([row for line in lines for row in (textwrap.wrap(line, 80) or [""])][:40])
    assert "+import paceline" in screen
    assert "+            run.step(optimizer)" in "\n".join(lines[:40])
    assert all(command in screen for command in ("make demo", "make test", "paceline run --nproc 2 train.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_not_wider_than_its_column_on_a_laptop(page: Path) -> None:
    """At 1366 x 768 a line has room for WIDEST characters; docs/widths.py sees what else is wide, in Chromium.

    Longer lines of output (```text) are broken, as in a terminal.
    """
    if page.is_relative_to(ROOT / "docs"):
        found = FENCE.finditer(page.read_text(encoding="utf-8"))
        lines = (line for match in found if match["kind"] != "text" for line in match["code"].splitlines())
        assert [line for line in lines if len(line) > WIDEST] == []


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    missing = [page for page in pages if f": {page}\n" not in nav]
    assert not missing, f"mkdocs.yml's nav lacks {missing}"


def test_make_targets_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.M))
        assert named <= targets, f"{page.name}: no target {named - targets}"
