"""Write the page of the results from their JSON, for `make gpu`.

    python3 -m benchmarks.gpu.page benchmarks/results/gpu.json benchmarks/gpu.md

A comment above each table names the JSON, as on the other pages with measured figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Results = dict[str, Any]  # what __main__.write has written


def page(results: Results, name: str) -> str:
    """The page, as Markdown. name: the path of the JSON from the root of the repository."""
    checks = results["checks"]
    tables = {
        "Checks": of_checks(checks),
        "How far from a plain loop": of_differences(checks),
        "What a step asks of the device": of_counts(checks),
        "What a step takes": of_steps(checks),
        "What a loss of 16-bit logits is worth": of_losses(checks),
        "What a long run grows by": of_growth(checks),
    }
    parts = [head(results, name)]
    for title, rows in tables.items():
        first, *others = rows
        if others:
            lines = [line(first), "|" + "---|" * len(first), *map(line, others)]
            parts.append(f"## {title}\n\n{NOTES.get(title, '')}<!-- figures: {name} -->\n\n" + "\n".join(lines))
    failed = [(name, check) for name, check in checks.items() if check["status"] != "passed"]
    if failed:
        told = [f"- `{name}`, {check['status']}: {' '.join(check['error'].split())[:600]}" for name, check in failed]
        parts.append("## What did not pass\n\n" + "\n".join(told))
    return "\n\n".join(parts) + "\n"


NOTES = {
    "How far from a plain loop": (
        "The difference of the weights as a share of what was learnt, of the case of each check that comes nearest to "
        "its limit.\n\n"
    ),
    "What a step asks of the device": "Ours / by hand.\n\n",
    "What a loss of 16-bit logits is worth": (
        "GPT-2's head and its cross-entropy, forward and backward, under autocast in bf16. Errors are relative, "
        "against float64 on the same values; that of the gradient is of what reaches the layer before the head.\n\n"
    ),
    "What a step takes": (
        "Medians with quartiles; ours / by hand and, as the control, by hand / by hand (A' / A), with 95% intervals. "
        "The share is of the rate that one large product of matrices reached in the same process.\n\n"
    ),
}


def head(results: Results, name: str) -> str:
    machine = results["machine"]
    words = [machine.get("gpu", "no GPU"), f"{machine['accelerators']} visible", machine["processor"],
             f"{machine['cores']} cores", f"torch {machine['torch']}"]  # fmt: skip
    words += [f"{title} {machine[key]}" for key, title in (("cuda", "CUDA"), ("nccl", "NCCL")) if key in machine]
    words.append(f"Python {machine['python']}")
    commands = dict.fromkeys(check["command"] for check in results["checks"].values())
    return "\n".join([
        "# What a GPU shows",
        "",
        f"Written from `{name}` by `python3 -m benchmarks.gpu.page`; edit neither.",
        "",
        f"{results['time'][:10]}: {', '.join(words)}.",
        "",
        "```",
        *commands,
        "```",
    ])  # fmt: skip


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def of_checks(checks: Results) -> Iterator[list[str]]:
    yield ["check", "part", "result", "s"]
    for name, check in checks.items():
        yield [f"`{name}`", check["part"], check["status"], number(check["seconds"]) if "seconds" in check else ""]


def of_differences(checks: Results) -> Iterator[list[str]]:
    yield ["check, case", "difference", "limit"]
    for name, check in checks.items():
        cases = {case: of for case, of in check.get("figures", {}).items() if isinstance(of, dict) and "limit" in of}
        if cases:
            case, worst = max(cases.items(), key=lambda item: item[1]["difference"] / item[1]["limit"])
            yield [f"`{name}`, {case.replace('=', ' ')}", number(worst["difference"]), number(worst["limit"])]


COUNTS = ("launches", "copies", "waits that torch tells of", "waits in the trace")


def of_counts(checks: Results) -> Iterator[list[str]]:
    yield ["step", *COUNTS]
    for case, of in checks.get("synchronisations_and_launches", {}).get("figures", {}).items():
        if of["ours"]:  # nothing is counted on a CPU
            yield [case, *(f"{number(of['ours'][what])} / {number(of['by hand'][what])}" for what in COUNTS)]


def of_steps(checks: Results) -> Iterator[list[str]]:
    yield ["step", "by hand, ms", "ours, ms", "ours / by hand", "A' / A", "ours: examples/s", "tokens/s",
           "peak MB: by hand", "ours", "share: by hand", "ours"]  # fmt: skip
    for check in checks.values():
        of = check.get("figures", {})
        if check["part"] != "steps" or "ours/by hand" not in of:
            continue
        ours, by_hand = of["ours"], of["by hand"]
        peaks = [of["sides"][side].get("peak memory, bytes") for side in ("A", "P")]
        yield [
            of["about"],
            *(f"{spread(side['median, s'], side['quartiles, s'], 1e3)}" for side in (by_hand, ours)),
            *(spread(of[name][0], of[name][1:]) for name in ("ours/by hand", "A'/A")),
            number(ours["examples/s"]),
            number(ours["tokens/s"]) if "tokens/s" in ours else "",
            *("" if peak is None else number(peak / 1e6) for peak in peaks),
            *(f"{100 * side['share of the matrix rate']:.1f}%" for side in (by_hand, ours)),
        ]


def spread(value: float, ends: list[float], unit: float = 1.0) -> str:
    return f"{value * unit:.3f} [{ends[0] * unit:.3f}, {ends[1] * unit:.3f}]"


def of_losses(checks: Results) -> Iterator[list[str]]:
    columns = ["error of the loss", "error of the gradient", "median, ms", "peak memory, MB"]
    yield ["", *columns]
    for name, of in checks.get("a_loss_of_16_bit_logits", {}).get("figures", {}).items():
        if "median, ms" in of:  # nothing is measured on a CPU
            yield [name, *(number(of[what]) for what in columns)]


def of_growth(checks: Results) -> Iterator[list[str]]:
    yield ["", "first", "last", "grew by", "at most"]
    for name, of in checks.get("nothing_grows", {}).get("figures", {}).get("over the time", {}).items():
        yield [name, *(number(of[what]) for what in ("first", "last", "grew by", "bar"))]


def write(source: Path, target: Path) -> None:
    """Write the page of a JSON file."""
    path = source.resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    target.write_text(page(json.loads(source.read_text()), name))


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:3]))
