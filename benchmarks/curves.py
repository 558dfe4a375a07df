"""The loss curves of an example on 1 and on 2 processes, one over the other, and how far they are apart.

    python benchmarks/curves.py --out docs/img/char_gpt.svg examples/char_gpt.py --data input.txt --steps 300
    python benchmarks/curves.py --out docs/img/cifar10.svg examples/cifar10_mobilenetv2.py --data cifar10.zip

Each run writes the global loss of every step (log_every = 1). A third run, on one process with the kernels for older
CPUs, shows what rounding alone does: it adds the same numbers in another order. (On a CPU without AVX-512 these are the
kernels of the other runs too, and there is no difference.)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}  # ATen's, oneDNN's, MKL's
ROUNDING = "1 process, other kernels"
RUNS: dict[str, tuple[int, dict[str, str]]] = {"1 process": (1, {}), "2 processes": (2, {}), ROUNDING: (1, OLDER)}
WIDTH, LEFT, PLOT, TOP, HIGH, LOW = 760, 66, 670, 46, 250, 110
COLOURS = {"1 process": "#f5a623", "2 processes": "#1b4f9c", ROUNDING: "#8a8a8a"}


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
    """A polyline of one point for each step, with `low` at the lower edge and `high` at the upper one."""
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
    """An SVG: the curves of 1 and 2 processes above, the distances from that of one process below (logarithmic)."""
    one, steps = curves["1 process"], len(curves["1 process"])
    most = max(max(one), *curves["2 processes"])
    low, high = 0.0, math.ceil(most * 2) / 2
    parts = [f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{title}</text>']
    unit = 0.5 if high <= 3 else 1.0
    ticks = {unit * i: f"{unit * i:g}" for i in range(round(high / unit) + 1)}
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
    for place, name in enumerate((ROUNDING, "2 processes")):
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
    size = f'width="{WIDTH}" height="{below + LOW + 44}" viewBox="0 0 {WIDTH} {below + LOW + 44}"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{back}\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the picture, an SVG")
    parser.add_argument("--smooth", type=int, default=1, help="draw means over so many steps")
    parser.add_argument("--losses", type=Path, help="write the losses here, as JSON")
    parser.add_argument("--title", default="", help="above the picture")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its arguments")
    options = parser.parse_args()
    curves = {name: losses(*how, options.command) for name, how in RUNS.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = {name: smoothed(curve, options.smooth) for name, curve in curves.items()}
    options.out.write_text(picture(drawn, options.title or Path(options.command[0]).name))
    if options.losses:
        options.losses.write_text(json.dumps(curves) + "\n")
    one = curves["1 process"]
    for name, curve in curves.items():
        apart = max(abs(a - b) for a, b in zip(one, curve, strict=True))
        print(f"{name:25} {len(curve)} steps, loss {curve[0]:.4f} to {curve[-1]:.4f}, largest difference {apart:.1e}")


if __name__ == "__main__":
    main()
