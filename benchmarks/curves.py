r"""Draw the loss curves of an example on 1 and on 2 processes, and their distance.

    python benchmarks/curves.py --json benchmarks/results/curves_char_gpt.json --out docs/img/char_gpt.svg \
        examples/char_gpt.py --data input.txt --steps 300
    python benchmarks/curves.py --json benchmarks/results/curves_char_gpt.json --out docs/img/char_gpt.svg
                                                     # runs nothing, and draws the picture from the file

Each run writes the global loss of every step (log_every = 1). A third run, on one process with the kernels for older
CPUs, shows the effect of rounding alone: it adds the same numbers in another order. (A CPU without AVX-512 uses these
kernels in all runs, so there is no difference.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}  # ATen's, oneDNN's, MKL's
ROUNDING = "1 process, other kernels"
RUNS: dict[str, tuple[int, dict[str, str]]] = {"1 process": (1, {}), "2 processes": (2, {}), ROUNDING: (1, OLDER)}
WIDTH, LEFT, PLOT, TOP, HIGH, LOW = 760, 66, 670, 46, 250, 110
COLOURS = {"1 process": "#f5a623", "2 processes": "#1b4f9c", ROUNDING: "#8a8a8a"}
SERIES = ("#1b4f9c", "#f5a623", "#3f9467")


def losses(processes: int, environment: dict[str, str], command: Sequence[str]) -> list[float]:
    """The global loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "curves.toml"
        settings.write_text(f'log_dir = {json.dumps(folder)}\nlog_every = 1\nprogress = "off"\n')
        start = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), "--config", str(settings)]
        subprocess.run([*start, *command], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """The mean over each step and the `over` - 1 before it."""
    windows = [values[max(step - over + 1, 0) : step + 1] for step in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def line(values: Sequence[float], low: float, high: float, top: int, height: int, style: str) -> str:
    """A polyline with one point per step, with `low` at the lower edge and `high` at the upper edge."""
    points = (
        f"{LEFT + PLOT * step / max(len(values) - 1, 1):.1f},"
        f"{top + height * (1 - (min(max(value, low), high) - low) / (high - low)):.1f}"
        for step, value in enumerate(values)
    )
    return f'<polyline fill="none" stroke-linejoin="round" {style} points="{" ".join(points)}"/>'


def axis(low: float, high: float, top: int, height: int, ticks: dict[float, str], name: str) -> list[str]:
    """A frame, with a grid line and a label at each tick."""
    parts = [f'<rect x="{LEFT}" y="{top}" width="{PLOT}" height="{height}" fill="none" stroke="#999"/>']
    for value, text in ticks.items():
        y = top + height * (1 - (value - low) / (high - low))
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + PLOT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = top + height / 2
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{name}</text>')
    return parts


def picture(curves: dict[str, list[float]], title: str) -> str:
    """An SVG: the curves of 1 and 2 processes above, their distances from the run on 1 process below (logarithmic)."""
    one, steps = curves["1 process"], len(curves["1 process"])
    most = max(max(one), *curves["2 processes"])
    low, high = 0.0, math.ceil(most * 2) / 2
    parts = [f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{title}</text>']
    unit = 0.5 if high <= 3 else 1.0
    ticks = {unit * i: f"{unit * i:g}" for i in range(math.floor(high / unit) + 1)}
    parts += axis(low, high, TOP, HIGH, ticks, "loss of the global batch")
    styles = {"1 process": 'stroke-width="6" stroke-opacity="0.75"', "2 processes": 'stroke-width="1.4"'}
    for place, (name, style) in enumerate(styles.items()):
        parts.append(line(curves[name], low, high, TOP, HIGH, f'stroke="{COLOURS[name]}" {style}'))
        x = LEFT + PLOT - 260 + 125 * place
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="38" y2="38" stroke="{COLOURS[name]}" {style}/>')
        parts.append(f'<text x="{x + 30}" y="42">{name}</text>')
    below = TOP + HIGH + 34
    least, top = -9.0, 1.0
    parts += axis(least, top, below, LOW, {p: f"1e{p:g}" for p in (-9, -6, -3, 0)}, "difference")
    for place, name in enumerate(name for name in (ROUNDING, "2 processes") if name in curves):
        apart = [math.log10(max(abs(a - b), 1e-12)) for a, b in zip(one, curves[name])]
        parts.append(line(apart, least, top, below, LOW, f'stroke="{COLOURS[name]}" stroke-width="1.2"'))
        x = LEFT + PLOT - 330 + 200 * place
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="{below - 9}" y2="{below - 9}" stroke="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 30}" y="{below - 5}">{name}</text>')
    parts.append(f'<text x="{LEFT}" y="{below - 9}">distance from 1 process</text>')
    for step in range(0, steps + 1, max(steps // 6 // 10 * 10, 1)):
        right = LEFT + PLOT * step / steps
        parts.append(f'<text x="{right:.0f}" y="{below + LOW + 16}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{LEFT + PLOT / 2}" y="{below + LOW + 34}" text-anchor="middle">step</text>')
    return svg(parts, below + LOW + 44)


def chart(curves: dict[str, list[tuple[float, float]]], title: str, across: str, up: str, unit: float) -> str:
    """An SVG with lines through (x, y). The x axis begins at 0; the y axis ends at multiples of `unit`.

    Points are marked if there are few. A name that ends in "not scaled" gets a dashed line in the previous colour.
    """
    low = math.floor(min(y for points in curves.values() for _, y in points) / unit) * unit
    high = math.ceil(max(y for points in curves.values() for _, y in points) / unit) * unit
    most = max(x for points in curves.values() for x, _ in points)
    steps = range(round((high - low) / unit) + 1)
    parts = [f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{title}</text>']
    parts += axis(low, high, TOP, HIGH, {low + unit * i: f"{low + unit * i:g}" for i in steps}, up)
    colour = -1
    for place, (name, points) in enumerate(curves.items()):
        dashed = name.endswith("not scaled")
        colour += not dashed
        style = f'stroke="{SERIES[colour]}" stroke-width="2"' + (' stroke-dasharray="6 4"' if dashed else "")
        at = [(LEFT + PLOT * x / most, TOP + HIGH * (1 - (y - low) / (high - low))) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline fill="none" stroke-linejoin="round" {style} points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{SERIES[colour]}"/>' for x, y in at if len(at) < 40]
        if len(curves) > 1:
            x = LEFT + PLOT * place / len(curves)
            parts.append(f'<line x1="{x:.0f}" x2="{x + 24:.0f}" y1="38" y2="38" {style}/>')
            parts.append(f'<text x="{x + 30:.0f}" y="42">{name}</text>')
    ticks = round(most) if most <= 12 else 6
    for tick in range(ticks + 1):
        place, words = LEFT + PLOT * tick / ticks, f"{most * tick / ticks:,.0f}"
        parts.append(f'<text x="{place:.0f}" y="{TOP + HIGH + 16}" text-anchor="middle">{words}</text>')
    parts.append(f'<text x="{LEFT + PLOT / 2}" y="{TOP + HIGH + 34}" text-anchor="middle">{across}</text>')
    return svg(parts, TOP + HIGH + 44)


def svg(parts: Sequence[str], height: int) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{back}\n' + "\n".join(parts) + "\n</svg>\n"


def summary(curves: dict[str, list[float]], over: int) -> dict[str, Any]:
    """For each run: the first loss, the last loss (a mean over `over` steps), and its distance from the run on 1
    process, in single steps and in means over `over` steps."""
    one = curves["1 process"]
    means = {name: smoothed(curve, over) for name, curve in curves.items()}
    return {
        name: {
            "first": curve[0],
            "last": means[name][-1],
            "largest_difference": max(abs(a - b) for a, b in zip(one, curve, strict=True)),
            "largest_difference_of_means": max(abs(a - b) for a, b in zip(means["1 process"], means[name])),
        }
        for name, curve in curves.items()
    }


def measure(words: Sequence[str], smooth: int) -> dict[str, Any]:
    from collate_draws import machine

    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    curves = {name: losses(*how, words) for name, how in RUNS.items()}
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]  # hide this machine's paths
    return {
        "command": shlex.join(["python", "benchmarks/curves.py", "--smooth", str(smooth), *shown]),
        "script": Path(words[0]).name,
        "time": when,
        "machine": machine(),
        "smooth": smooth,
        "summary": summary(curves, smooth),
        "losses": {name: [round(loss, 8) for loss in curve] for name, curve in curves.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, required=True, help="the losses are kept here; without SCRIPT read from here"
    )
    parser.add_argument("--out", type=Path, required=True, help="the picture, an SVG")
    parser.add_argument("--smooth", type=int, default=1, help="draw means over so many steps")
    parser.add_argument("--title", default="", help="above the picture; the script's name if not given")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments")
    options = parser.parse_args()
    if options.script:
        options.json.write_text(json.dumps(measure(options.script, options.smooth)) + "\n")
    found = json.loads(options.json.read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = {name: smoothed(curve, found["smooth"]) for name, curve in found["losses"].items()}
    options.out.write_text(picture(drawn, options.title or found["script"]))
    for name, one in found["summary"].items():
        print(f"{name:25} {', '.join(f'{key} {value:.6g}' for key, value in one.items())}")


if __name__ == "__main__":
    main()
