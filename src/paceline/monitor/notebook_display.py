"""The progress display in a notebook: a bar, the loss curve, and a line per epoch, updated in place.

It is redrawn about once a second, from numbers that the run has already computed, so it adds no work to a step. The
picture is HTML with a small SVG. It uses the notebook's text colour, so it fits light and dark themes.
"""

from __future__ import annotations

import html
import math
import os
import time
from collections.abc import Mapping

from paceline.monitor.display import Writer
from paceline.monitor.summary import number
from paceline.notebook import Place, after_each_cell

DRAW_SECONDS = 1.0
MOST_POINTS = 400  # per curve; above this number, every second point is dropped
LINES = 12  # number of lines about epochs and logged values; older lines are dropped
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 180, 56, 20, 8  # size and margins of the SVG, in its units
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c")
_DECADES = 1.5  # positive values over a wider range get a logarithmic scale

Points = list[tuple[float, float]]
"""(step, value) pairs, in step order."""


class NotebookDisplay:
    """The progress display of rank 0 in a notebook."""

    def __init__(self, writer: Writer, place: Place) -> None:
        self._writer, self._place = writer, place
        self.due = 0.0
        self._curves: dict[str, Points] = {"loss": []}
        self._lines: list[str] = []
        self._drawn: object = None  # the state of the last picture
        self._pid = os.getpid()
        # Also draw after each cell: a loop without run.epochs, or an interrupted loop, does not report its end.
        self._forget = after_each_cell(self._draw_if_moved)

    def refresh(self, now: float) -> None:
        self._note_losses()
        self._draw(now, self._writer.position())
        self.due = time.perf_counter() + DRAW_SECONDS

    def epoch_ended(self, now: float) -> None:
        self._note_losses()
        self._add_line(self._writer.epoch(now))
        if now >= self.due:
            self.refresh(now)

    def logged(self, values: Mapping[str, float]) -> None:
        step = self._writer.view.updates
        for key, value in values.items():
            if "loss" in key and (key in self._curves or len(self._curves) < len(_COLOURS)):
                _append(self._curves.setdefault(key, []), step, value)
        self._add_line(self._writer.logged(values))

    def close(self) -> None:
        self._forget()
        if os.getpid() == self._pid:
            self._note_losses()
            self._add_line(self._writer.last_epoch())
            self._draw(time.perf_counter(), self._writer.position())

    def _draw_if_moved(self) -> None:
        if os.getpid() == self._pid and self._state() != self._drawn:
            self.refresh(time.perf_counter())

    def _state(self) -> object:
        view = self._writer.view
        return view.epoch, view.step, view.loss, tuple(self._lines)

    def _note_losses(self) -> None:
        losses = self._writer.view.losses
        while losses:
            _append(self._curves["loss"], *losses.popleft())

    def _add_line(self, line: str | None) -> None:
        if line is not None:
            self._lines = [*self._lines, line][-LINES:]

    def _draw(self, now: float, position: str) -> None:
        self._drawn = self._state()
        line = "  ".join([position, *self._writer.numbers(now, memory=True)])
        shown = {name: points for name, points in self._curves.items() if len(points) > 1}
        parts = [_text(line), _bar(self._writer.fraction()), curves(shown), _text("\n".join(self._lines))]
        self._place.show(f'<div style="max-width:{WIDTH}px">{"".join(parts)}</div>', "\n".join([line, *self._lines]))


def _append(points: Points, step: float, value: float) -> None:
    if math.isfinite(value) and (not points or step > points[-1][0]):
        points.append((step, value))
        if len(points) > MOST_POINTS:
            del points[1:-1:2]


def _text(text: str) -> str:
    style = "margin:2px 0;white-space:pre-wrap;font-family:monospace;font-size:12px;line-height:1.4"
    return f'<div style="{style}">{html.escape(text)}</div>' if text else ""


def _bar(fraction: float | None) -> str:
    if fraction is None:
        return ""
    full = f'<div style="width:{100 * fraction:.1f}%;height:6px;background:#1f77b4;border-radius:3px"></div>'
    return f'<div style="background:rgba(128,128,128,.25);border-radius:3px">{full}</div>'


def curves(found: Mapping[str, Points]) -> str:
    """Return an SVG of these curves by step, with a scale; "" if there are no points."""
    points = [point for each in found.values() for point in each]
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    logarithmic = low > 0 and math.log10(high / low) > _DECADES
    scaled = math.log10 if logarithmic else float
    bottom, top, first, last = scaled(low), scaled(high), min(steps), max(steps)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * (step - first) / max(last - first, 1e-12)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - scaled(value)) / max(top - bottom, 1e-12)

    middle = (bottom + top) / 2
    parts = [_rule(y(value), value) for value in {low, 10**middle if logarithmic else middle, high}]
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(_label(x(step), HEIGHT - 4, f"step {number(step)}", anchor))
    for place, (name, each) in enumerate(found.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in each)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_label(WIDTH - 12, TOP + 14 + 14 * place, name, "end", colour))
    inner = "".join(parts)
    style = "display:block;width:100%;color:inherit"
    named = ", ".join(found)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}" role="img" aria-label="{html.escape(named)} by step">'
        f"{inner}</svg>"
    )


def _rule(height: float, value: float) -> str:
    ends = f'x1="{LEFT}" x2="{WIDTH - 8}" y1="{height:.1f}" y2="{height:.1f}"'
    line = f'<line {ends} stroke="currentColor" stroke-opacity="0.2"/>'
    return line + _label(LEFT - 6, height + 4, number(value), "end")


def _label(x: float, y: float, text: str, anchor: str, colour: str = "currentColor") -> str:
    style = f'fill="{colour}" font-size="11" font-family="sans-serif" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'
