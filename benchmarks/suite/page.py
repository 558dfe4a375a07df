"""Write docs/benchmarks.md and its charts from the JSON files of `make bench`. Does not import torch.

python -m benchmarks.suite.page benchmarks/results docs/benchmarks.md
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.curves import WIDTH, svg
from benchmarks.suite.contenders import AGAIN, BY_HAND, KINDS, ROOT
from benchmarks.suite.figures import settled

IMAGES = "img/benchmarks"
GPU = "gpu"
OURS, PEER, OTHER = "#1f6feb", "#8c959f", "#d0d7de"
WORDS = {1: "One process", 2: "Two processes", 4: "Four processes", 8: "Eight processes", 16: "Sixteen processes"}

INTRODUCTION = """\
# Benchmarks beside other tools

Examples per second of Paceline, hand-written PyTorch, Accelerate, Lightning Fabric, DeepSpeed and
tf.distribute on CPUs. `make bench` writes this page.

- **Setup**: the same model, first weights, order, global batch and optimizer, in float32, each tool set up as its
  documentation recommends for CPUs. The processes divide the cores. The batch is in memory, so data loading is not
  measured (benchmarks/README.md has steps with their loader).
- **Hand-written** is DistributedDataParallel, and with one process the plain step.
- **Options**: `gradient_as_bucket_view` and `static_graph` for hand-written DDP, Accelerate, Fabric and
  `Paceline ddp, gloo`; ZeRO stage 0 for DeepSpeed; `channels_last` with torch, NHWC with TensorFlow.
- **Memory of a step**: Paceline lets glibc's malloc keep freed memory (docs/settings.md), which other tools leave as it
  is. benchmarks/README.md has the effect of that alone.
- **Speed**: the contenders take turns, and are all launched several times, since the same program launched again may
  be a tenth slower (its memory lies elsewhere). Shown is the mean over launches of the median over rounds; ratios are
  taken within a round; with the 95% interval of a bootstrap over launches and rounds.
- **≈** marks no difference: the interval contains 1, or the ratio is no further from 1 than the interval of the
  control (hand-written against itself).
- **Check**: before timing, the losses of the first 4 steps must match one process over the whole global batch to 0.2%
  (`mobilenet`: 2%); if that is not in the run, the hand-written step. With batch norm per shard they must match
  hand-written DDP. The rest is left out.
- **Memory** is the peak resident memory of the largest process, in MB.
- The files also have ratios to one process, and bytes sent.
"""

EMPTY = "Nothing has been measured on this page yet."
Documents = dict[int, dict[str, Any]]
"""The document of each number of processes."""


def page(documents: Documents, folder: str) -> str:
    """The page, as Markdown. folder: of the JSON files, from the root of the repository."""
    parts, on_device = [INTRODUCTION], {"left_out": "no run included the GPU models"}
    for processes, document in documents.items():
        models = document["models"]
        on_device = models.get(GPU, on_device)
        measured = {model: found for model, found in models.items() if "contenders" in found}
        if measured:
            parts += section(processes, document, measured, f"{folder}/bench_{processes}.json")
        for model, found in models.items():
            if "left_out" in found and model != GPU:
                parts.append(f"`{model}` is left out: {found['left_out']}.\n")
    if len(parts) == 1:
        return "\n".join([*parts, EMPTY, ""])
    parts += descriptions(documents)
    parts.append(on_gpu(on_device, f"{folder}/bench_1.json"))
    return "\n".join(parts)


def section(processes: int, document: dict[str, Any], measured: dict[str, Any], name: str) -> Iterator[str]:
    """The part about one number of processes."""
    machine = document["machine"]
    yield f"## {WORDS.get(processes, f'{processes} processes')}\n"
    crowded = f" {processes} processes share {machine['cores']} cores, so they also wait for each other."
    yield (
        f"{document['time'][:10]}: {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}.{crowded if processes > machine['cores'] else ''}\n"
    )
    for note in dict.fromkeys(found["note"] for found in measured.values() if "note" in found):
        yield f"{textwrap.fill(note, 118)}\n"
    commands = dict.fromkeys(found["command"] for found in measured.values())
    yield "\n".join(["```", *map(folded, commands), "```", ""])
    yield "The fastest Paceline strategy. Ratios of examples/s; more than 1 is faster.\n"
    yield table(summary(measured), name)
    yield f"Each contender / hand-written.{' (1): batch norm per shard.' if processes > 1 else ''}\n"
    yield table(beside(measured, processes), name)
    yield "Peak memory.\n"
    yield table(memory(measured), name)
    for model, found in measured.items():
        if found["skipped"]:
            yield "\n".join(f"- `{model}`, {title}: left out. {why}" for title, why in found["skipped"].items()) + "\n"


def descriptions(documents: Documents) -> Iterator[str]:
    """What each model is, and its charts."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for processes, document in documents.items():
        for model, of in document["models"].items():
            if "contenders" in of:
                found.setdefault(model, {})[processes] = of
    for model, runs in found.items():
        of = next(iter(runs.values()))
        yield f"## {of['about'][0].upper()}{of['about'][1:]}\n"
        yield (
            f"`{model}`: {of['parameters']:,} parameters, a global batch of {of['global_batch']}, {of['optimizer']}. "
            f"{'; '.join(rounds(processes, one) for processes, one in runs.items())}.\n"
        )
        for processes in runs:
            yield f"![{model}, {processes}: examples per second]({IMAGES}/{model}_{processes}.svg)\n"


def rounds(processes: int, of: dict[str, Any]) -> str:
    return f"n = {processes}: {of['launches']} launches, {of['rounds']} rounds of {of['steps_of_a_block']} steps"


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
    several = any("ours / all threads" in found["best"] for found in measured.values())
    whole = {"ours / all threads": "/ one process, all threads"} if several else {}
    ratios = {"ours / peer": "Paceline / fastest other", "ours / by hand": "/ hand-written", **whole}
    yield ["model", "Paceline", "fastest other", *ratios.values(), "control"]
    for model, found in measured.items():
        best = found["best"]
        control = best.get("control")
        if "ours" not in best:
            continue
        cells = [
            f"`{model}`",
            best["ours"].removeprefix("Paceline ").replace("Paceline", "single"),
            best.get("peer", ""),
        ]
        for key in ratios:
            cells.append(ratio(best[key], control) if key in best else "")
        yield [*cells, ratio(control) if control else ""]


def beside(measured: dict[str, Any], processes: int) -> Iterator[list[str]]:
    """A row for each contender, a column for each model."""
    titles = dict.fromkeys(title for found in measured.values() for title in found["contenders"])
    yield ["", *(f"`{model}`" for model in measured)]
    for title in titles:
        if title not in (AGAIN, BY_HAND):  # the control, which the summary shows, and the base
            yield [title, *(cell(title, found, processes) for found in measured.values())]


def cell(title: str, found: dict[str, Any], processes: int) -> str:
    of = found["contenders"].get(title, {})
    if f"x {BY_HAND}" not in of:
        return ""
    shard = processes > 1 and found["batch_norm"] and KINDS[title].batch_norm == "shard"
    return ratio(of[f"x {BY_HAND}"], found["best"].get("control")) + " (1)" * shard


def memory(measured: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each contender, a column for each model."""
    titles = dict.fromkeys(title for found in measured.values() for title in found["contenders"])
    yield ["MB", *(f"`{model}`" for model in measured)]
    for title in titles:
        if title != AGAIN:
            every = [found["contenders"].get(title) for found in measured.values()]
            peaks = ["" if of is None else f"{of['peak resident MB, a process']:,.0f}" for of in every]
            yield [title, *peaks]


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


def chart(found: dict[str, Any], title: str) -> str:
    """An SVG with a bar for the examples/s of each contender, with its interval."""
    contenders = found["contenders"]
    most = max(of["examples/s"][2] for of in contenders.values())
    left, bar, top = 215, 22, 40
    room = WIDTH - left - 95
    parts = [f'<text x="16" y="22" font-size="15" font-weight="bold">{title}: examples per second</text>']
    for place, (name, of) in enumerate(contenders.items()):
        y, (median, low, high) = top + place * bar, of["examples/s"]
        kind = KINDS[name]
        colour = OURS if kind.kind == "paceline" else PEER if kind.peer else OTHER
        long, ends = room * median / most, [left + room * end / most for end in (low, high)]
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
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


def read(folder: Path) -> Documents:
    """The documents in a folder, by their number of processes."""
    found = [json.loads(path.read_text()) for path in folder.glob("bench_*.json")]
    return {document["processes"]: document for document in sorted(found, key=lambda document: document["processes"])}


def write(folder: Path, target: Path) -> None:
    """Write the page of a folder of JSON files, and its charts beside it."""
    documents, path = read(folder), folder.resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    images = target.parent / IMAGES
    images.mkdir(parents=True, exist_ok=True)
    for processes, document in documents.items():
        for model, found in document["models"].items():
            if "contenders" in found:
                title = f"{model}, n = {processes}"
                (images / f"{model}_{processes}.svg").write_text(chart(found, title))
    target.write_text(page(documents, name))


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:3]))
