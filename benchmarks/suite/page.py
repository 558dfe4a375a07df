"""Write docs/benchmarks.md and its charts from the JSON of `make bench`. Does not import torch.

python -m benchmarks.suite.page benchmarks/results/bench.json docs/benchmarks.md
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.curves import WIDTH, svg
from benchmarks.suite.contenders import AGAIN, BY_HAND, CONTENDERS, FORMER, ROOT
from benchmarks.suite.figures import settled

IMAGES = "img/benchmarks"
GPU = "gpu"
KINDS = {one.name: one for one in [*CONTENDERS, *FORMER]}
OURS, PEER, OTHER = "#1f6feb", "#8c959f", "#d0d7de"

INTRODUCTION = """\
# Benchmarks beside other tools

Examples per second of Paceline, hand-written DDP, Accelerate, Lightning Fabric, DeepSpeed and
tf.distribute on CPUs. `make bench` writes this page from `{name}`.

- **Setup**: the same model, first weights, order, global batch and optimizer, in float32, each tool set up as its
  documentation recommends for CPUs. Runs with two processes have one thread each; the run with one process has
  one thread per core. The batch is in memory, so data loading is not measured.
- **Options**: `gradient_as_bucket_view` and `static_graph` for hand-written DDP, Accelerate, Fabric and
  `Paceline ddp, gloo`; ZeRO stage 0 for DeepSpeed; `channels_last` with torch, NHWC with TensorFlow.
- **Speed**: the contenders take turns. Medians over rounds; ratios within a round, with their 95% bootstrap interval.
- **≈** marks no difference: the interval contains 1, or the ratio is no further from 1 than the interval of the
  control (hand-written DDP against itself).
- **Check**: before timing, the losses of the first 4 steps must match one process over the whole global batch to 0.2%
  (`mobilenet`: 2%). With batch norm per shard they must match hand-written DDP. The rest is left out.
- The file also has ratios to one process, bytes sent, and memory.
"""

EMPTY = "Nothing has been measured on this page yet."


def page(document: dict[str, Any], name: str) -> str:
    """The page, as Markdown. name: the path of the JSON from the root of the repository."""
    models = {model: found for model, found in document["models"].items() if model != GPU}
    measured = {model: found for model, found in models.items() if "left_out" not in found}
    parts = [INTRODUCTION.format(name=name)]
    if not measured:
        return "\n".join([*parts, EMPTY, ""])
    machine = document["machine"]
    parts.append(
        f"{document['time'][:10]}: {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}.\n"
    )
    notes = dict.fromkeys(found["note"] for found in measured.values() if "note" in found)
    parts += [f"{textwrap.fill(note, 118)}\n" for note in notes]
    commands = dict.fromkeys(found["command"] for found in measured.values())
    parts.append("\n".join(["```", *map(folded, commands), "```", ""]))
    parts.append("## Summary\n")
    parts.append("Ratios of examples/s of the fastest Paceline strategy; more than 1 is faster.\n")
    parts.append(table(summary(measured), name))
    parts.append("## Each contender beside hand-written DDP\n")
    parts.append("Ratios of examples/s. (1): batch norm per shard, as in hand-written DDP.\n")
    parts.append(table(beside(measured), name))
    for model, found in measured.items():
        parts.append(f"## {found['about'][0].upper()}{found['about'][1:]}\n")
        parts.append(
            f"{found['parameters']:,} parameters, a global batch of {found['global_batch']}, {found['optimizer']}, "
            f"{found['rounds']} rounds of {found['steps_of_a_block']} steps each.\n"
        )
        parts.append(f"![Examples per second of each contender]({IMAGES}/{model}.svg)\n")
        if found["skipped"]:
            parts.append("\n".join([f"- {title}: left out. {why}" for title, why in found["skipped"].items()]) + "\n")
    for model, found in models.items():
        if "left_out" in found:
            parts.append(f"`{model}` is left out: {found['left_out']}.\n")
    parts.append(on_gpu(document["models"].get(GPU, {"left_out": "this run did not include the GPU models"}), name))
    return "\n".join(parts)


def folded(command: str) -> str:
    """The command over several lines, for a shell."""
    return " \\\n    ".join(textwrap.wrap(command, 88, break_long_words=False, break_on_hyphens=False))


def table(lines: Iterator[list[str]], name: str) -> str:
    first, *others = lines
    shown = ["| " + " | ".join(cells) + " |" for cells in others]
    head = ["| " + " | ".join(first) + " |", "|" + "---|" * len(first)]
    return "\n".join([f"<!-- figures: {name} -->", *head, *shown, ""])


def ratio(of: list[float], control: list[float] | None = None) -> str:
    """A ratio with its interval. control: the ratio of the A/A contender; "≈" marks a ratio within it."""
    text = f"{of[0]:.2f} [{of[1]:.2f}, {of[2]:.2f}]"
    return text if control is None or settled(of, control) else f"≈{text}"


def summary(measured: dict[str, Any]) -> Iterator[list[str]]:
    yield ["model", "Paceline", "fastest other", "Paceline / fastest other", "/ DDP", "/ one process, all threads",
           "control"]  # fmt: skip
    for model, found in measured.items():
        best = found["best"]
        control = best.get("control")
        if "ours" not in best:
            continue
        cells = [f"`{model}`", best["ours"].removeprefix("Paceline "), best.get("peer", "")]
        for key in ("ours / peer", "ours / by hand", "ours / all threads"):
            cells.append(ratio(best[key], control) if key in best else "")
        yield [*cells, ratio(control) if control else ""]


def shown(title: str) -> str:
    return title.replace("DDP by hand", "hand-written DDP")


def beside(measured: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each contender, a column for each model."""
    titles = dict.fromkeys(title for found in measured.values() for title in found["contenders"])
    yield ["", *(f"`{model}`" for model in measured)]
    for title in titles:
        if title not in (AGAIN, BY_HAND):  # the control, which the summary shows, and the base
            yield [title, *(cell(title, found) for found in measured.values())]


def cell(title: str, found: dict[str, Any]) -> str:
    of = found["contenders"].get(title, {})
    if f"x {BY_HAND}" not in of:
        return ""
    shard = found["batch_norm"] and KINDS[title].batch_norm == "shard"
    return ratio(of[f"x {BY_HAND}"], found["best"].get("control")) + " (1)" * shard


def on_gpu(found: dict[str, Any], name: str) -> str:
    head = "## On a CUDA device\n"
    if "left_out" in found:
        return f"{head}\nNot measured: {found['left_out']}. On a machine with a GPU run `make bench MODELS=gpu`.\n"

    def lines() -> Iterator[list[str]]:
        yield ["a step", "hand-written, ms", "Paceline, ms", "Paceline / hand-written", "control", "examples/s",
               "tokens/s", "of the matrix rate"]  # fmt: skip
        for way, of in found["ways"].items():
            ours = of["ours"]
            yield [
                way,
                *(f"{1e3 * of[side]['median, s']:.2f}" for side in ("by hand", "ours")),
                ratio(of["ours/by hand"]),
                ratio(of["A'/A"]),
                f"{ours['examples/s']:,.1f}",
                f"{ours['tokens/s']:,.0f}" if "tokens/s" in ours else "",
                f"{100 * ours['share of the matrix rate']:.1f}%",
            ]

    skipped = "\n".join(f"- {way}: left out. {why}" for way, why in found["skipped"].items())
    return "\n".join([head, table(lines(), name), skipped])


def chart(found: dict[str, Any], model: str) -> str:
    """An SVG with a bar for the examples/s of each contender, with its interval."""
    contenders = found["contenders"]
    most = max(of["examples/s"][2] for of in contenders.values())
    left, bar, top = 215, 22, 40
    room = WIDTH - left - 95
    parts = [f'<text x="16" y="22" font-size="15" font-weight="bold">{model}: examples per second</text>']
    for place, (title, of) in enumerate(contenders.items()):
        y, (median, low, high) = top + place * bar, of["examples/s"]
        kind = KINDS[title]
        colour = OURS if kind.kind == "paceline" else PEER if kind.peer else OTHER
        long, ends = room * median / most, [left + room * end / most for end in (low, high)]
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{shown(title)}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{long:.1f}" height="{bar - 7}" fill="{colour}"/>')
        across = f'x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + 10}" y2="{y + 10}"'
        parts.append(f'<line {across} stroke="#222" stroke-width="1.5"/>')
        parts.append(f'<text x="{ends[1] + 8:.1f}" y="{y + 14}">{median:,.0f}</text>')
    return svg(parts, top + bar * len(contenders) + 12)


def said(model: str, found: dict[str, Any]) -> Iterator[str]:
    """A model's results, for the console."""
    if "contenders" not in found:
        return
    for title, of in found["contenders"].items():
        by_hand = f"  x by hand {ratio(of[f'x {BY_HAND}'])}" if f"x {BY_HAND}" in of else ""
        yield f"{title:32} {of['examples/s'][0]:10,.1f} examples/s{by_hand}"


def write(source: Path, target: Path) -> None:
    """Write the page of a JSON file, and its charts beside it."""
    document = json.loads(source.read_text())
    path = source.resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    images = target.parent / IMAGES
    images.mkdir(parents=True, exist_ok=True)
    for model, found in document["models"].items():
        if "contenders" in found:
            (images / f"{model}.svg").write_text(chart(found, model))
    target.write_text(page(document, name))


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:3]))
