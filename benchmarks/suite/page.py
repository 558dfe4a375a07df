"""docs/benchmarks.md and its charts, from the JSON of `make bench`; they show nothing else. Imports no torch.

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
from benchmarks.suite.contenders import AGAIN, BY_HAND, CONTENDERS, FORMER, REFERENCE, ROOT
from benchmarks.suite.figures import settled

IMAGES = "img/benchmarks"
GPU = "gpu"
KINDS = {one.name: one for one in [*CONTENDERS, *FORMER]}
OURS, PEER, OTHER = "#1f6feb", "#8c959f", "#d0d7de"

INTRODUCTION = """\
# Beside others, measured

Written by `make bench` from `{name}`. Each table is of one run, in which the contenders took turns: all have the same
model, first weights, order, global batch and optimizer, and each is set up as its documentation advises for CPUs, in
float32. Two processes have one thread each; one process has as many threads as there are cores. `DDP by hand` has
`gradient_as_bucket_view` and `static_graph`, and so do Accelerate, Fabric and `Paceline ddp, gloo`; DeepSpeed has ZeRO
stage 0. Weights and images of convolutions lie in memory as `channels_last` with torch, and as NHWC with TensorFlow. A
batch lies in memory, so that no loader is measured.

Speeds are medians over rounds. Ratios are those within a round, with their 95% interval, a bootstrap over rounds.
`DDP by hand, again` is the control: the same program twice. A ratio that is not further from 1 than the control's
interval, or whose own interval has 1 in it, is called "no difference".

Before anything is timed, the losses of the first 4 steps must be those of one process over the whole global batch (to
0.2 %; to 2 % with `mobilenet`, of which float32 and float64 are 0.2 % apart by then); a contender that computes
something else is left out. (Batch norm over a shard is compared with that of DDP by hand.)
Bytes are those that a process sent by TCP, as the kernel counts them: what goes through shared memory or a Unix socket
is not among them. Memory that processes share is divided among them.
"""

EMPTY = "Nothing has been measured on this page yet."


def page(document: dict[str, Any], name: str) -> str:
    """name: of the JSON, from the root of the repository."""
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
    parts.append("## Paceline's best way, and the best of the others\n")
    parts.append("examples/s as ratios; more than 1 is faster.\n")
    parts.append(table(summary(measured), name))
    for model, found in measured.items():
        parts.append(f"## {found['about'][0].upper()}{found['about'][1:]}\n")
        parts.append(
            f"{found['parameters']:,} parameters, a global batch of {found['global_batch']}, {found['optimizer']}, "
            f"{found['rounds']} rounds of {found['steps_of_a_block']} steps each.\n"
        )
        parts.append(f"![Examples a second of each contender]({IMAGES}/{model}.svg)\n")
        parts.append(table(rows(found), name))
        if found["skipped"]:
            parts.append("\n".join([f"- {title}: left out. {why}" for title, why in found["skipped"].items()]) + "\n")
    for model, found in models.items():
        if "left_out" in found:
            parts.append(f"`{model}` is left out: {found['left_out']}.\n")
    parts.append(on_gpu(document["models"].get(GPU, {"left_out": "it was not asked for"}), name))
    return "\n".join(parts)


def folded(command: str) -> str:
    """Over several lines, as a shell takes it."""
    return " \\\n    ".join(textwrap.wrap(command, 88, break_long_words=False, break_on_hyphens=False))


def table(lines: Iterator[list[str]], name: str) -> str:
    first, *others = lines
    shown = ["| " + " | ".join(cells) + " |" for cells in others]
    head = ["| " + " | ".join(first) + " |", "|" + "---|" * len(first)]
    return "\n".join([f"<!-- figures: {name} -->", *head, *shown, ""])


def ratio(of: list[float], control: list[float] | None = None) -> str:
    """With its interval. control: that of the A/A contender; a ratio within it is no difference."""
    text = f"{of[0]:.2f} [{of[1]:.2f}, {of[2]:.2f}]"
    return text if control is None or settled(of, control) else f"{text}, no difference"


def summary(measured: dict[str, Any]) -> Iterator[list[str]]:
    yield ["model", "Paceline", "the other", "Paceline / the other", "/ DDP by hand", "/ one process, all threads",
           "/ one process, one thread", "control"]  # fmt: skip
    for model, found in measured.items():
        best = found["best"]
        control = best.get("control")
        if "ours" not in best:
            continue
        cells = [f"`{model}`", best["ours"].removeprefix("Paceline "), best.get("peer", "")]
        for key in ("ours / peer", "ours / by hand", "ours / all threads", "ours / one thread"):
            cells.append(ratio(best[key], control) if key in best else "")
        yield [*cells, ratio(control) if control else ""]


def rows(found: dict[str, Any]) -> Iterator[list[str]]:
    yield ["", "examples/s", "x DDP by hand", "x one process, all threads", "sent, MB a step", "peak, MB a process",
           "memory of all, MB"]  # fmt: skip
    control = found["best"].get("control")
    for title, of in found["contenders"].items():
        ratios = []
        for name in (BY_HAND, REFERENCE):
            own = of.get(f"x {name}")
            ratios.append("" if own is None or name == title else ratio(own, None if title == AGAIN else control))
        shard = found["batch_norm"] and KINDS[title].batch_norm == "shard"
        yield [
            title + ", batch norm by shard" * shard,
            f"{of['examples/s'][0]:,.1f}",
            *ratios,
            f"{of['sent MB a step, each process']:.2f}",
            f"{of['peak resident MB, a process']:.0f}",
            f"{of['proportional MB, all processes']:.0f}",
        ]


def on_gpu(found: dict[str, Any], name: str) -> str:
    head = "## On a CUDA device\n"
    if "left_out" in found:
        return f"{head}\nNot measured: {found['left_out']}. `make bench MODELS=gpu` is for a machine that has one.\n"

    def lines() -> Iterator[list[str]]:
        yield ["a step", "by hand, ms", "Paceline, ms", "Paceline's / by hand's", "control", "examples/s", "tokens/s",
               "of the matrix rate"]  # fmt: skip
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
    """An SVG: a bar of the examples/s of each contender, with its interval."""
    contenders = found["contenders"]
    most = max(of["examples/s"][2] for of in contenders.values())
    left, bar, top = 215, 22, 40
    room = WIDTH - left - 95
    parts = [f'<text x="16" y="22" font-size="15" font-weight="bold">{model}: examples a second</text>']
    for place, (title, of) in enumerate(contenders.items()):
        y, (median, low, high) = top + place * bar, of["examples/s"]
        kind = KINDS[title]
        colour = OURS if kind.kind == "paceline" else PEER if kind.peer else OTHER
        long, ends = room * median / most, [left + room * end / most for end in (low, high)]
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{title}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{long:.1f}" height="{bar - 7}" fill="{colour}"/>')
        across = f'x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + 10}" y2="{y + 10}"'
        parts.append(f'<line {across} stroke="#222" stroke-width="1.5"/>')
        parts.append(f'<text x="{ends[1] + 8:.1f}" y="{y + 14}">{median:,.0f}</text>')
    return svg(parts, top + bar * len(contenders) + 12)


def said(model: str, found: dict[str, Any]) -> Iterator[str]:
    """What a console is told of a model."""
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
