"""The comparison as one HTML file, a plotly figure: the recommendation, tables, charts, and why rows differ or failed.

The page contains plotly.js, so it loads nothing from the network. It shows the data of the `--json` document.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from plotly import graph_objects
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from paceline.compare import table

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

_COLOURS = qualitative.Safe  # distinguishable with colour blindness
_DASHES = ("solid", "dash", "dot", "dashdot")
_GAP = 90  # pixels between two panels, for the upper panel's axis and the lower panel's title
_CHARACTERS = 110  # approximate length of a line in a table


class _Panel(NamedTuple):
    """A table, or a chart with its legend."""

    title: str
    traces: Sequence[Any]
    height: int  # pixels
    x: Mapping[str, Any] = {}  # settings of the axes
    y: Mapping[str, Any] = {}


def render_page(document: Document) -> str:
    """Return the whole file."""
    ran = list(filter(table.ran, document["rows"]))
    panels = [_summary(document)]
    if ran:
        chosen = document["verdict"]["row"] if document["verdict"] is not None else None
        panels += [_figures(ran, chosen), _speed(ran), _parts(ran), _memory(ran), _wire(ran), _losses(ran)]
        panels.append(_differences(ran))
    panels.append(_reasons(document["rows"]))
    page: str = _figure([panel for panel in panels if panel.traces]).to_html(config={"displayModeBar": False})
    return page


def _figure(panels: Sequence[_Panel]) -> Any:
    """Arrange the panels below each other. A chart's legend is at its right."""
    whole = sum(panel.height for panel in panels) + _GAP * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        cols=2,
        specs=[[{"type": "xy"} if panel.x else {"type": "domain", "colspan": 2}, None] for panel in panels],
        column_widths=[0.75, 0.25],
        subplot_titles=[panel.title for panel in panels],
        row_heights=[panel.height for panel in panels],
        vertical_spacing=_GAP / whole if len(panels) > 1 else 0,
    )
    figure.update_layout(
        template="plotly_white", width=1200, height=whole + 120, barmode="stack", margin={"t": 60, "b": 60}
    )
    for number, panel in enumerate(panels, start=1):
        for trace in panel.traces:
            figure.add_trace(trace, row=number, col=1)
        if panel.x:
            figure.update_xaxes(panel.x, row=number, col=1, automargin=True)
            figure.update_yaxes(panel.y, row=number, col=1, automargin=True)
            legend = f"legend{number}"
            top = next(figure.select_yaxes(row=number, col=1)).domain[1]
            figure.update_traces(legend=legend, row=number, col=1)
            figure.update_layout({legend: {"x": 0.76, "y": top, "yanchor": "top", "traceorder": "normal"}})
    return figure


def _escaped(value: object) -> str:
    """Escape HTML, because plotly interprets some of it in texts."""
    return html.escape(str(value), quote=False)


# ---- tables ----


def _table(columns: Mapping[str, Sequence[str]], widths: Sequence[float], colours: Sequence[str] = ("white",)) -> Any:
    return graph_objects.Table(
        header={"values": [f"<b>{_escaped(name)}</b>" for name in columns], "align": "left"},
        cells={
            "values": [list(map(_escaped, column)) for column in columns.values()],
            "align": "left",
            "height": 26,
            "fill_color": [list(colours)],
        },
        columnwidth=list(widths),
    )


def _height(texts: Sequence[str]) -> int:
    return 70 + sum(8 + 20 * math.ceil(len(text) / _CHARACTERS) for text in texts)


def _summary(document: Document) -> _Panel:
    verdict = document["no_verdict"] if document["verdict"] is None else document["verdict"]["sentence"]
    texts = [*([verdict] if verdict else []), _facts(document)]
    return _Panel("", [_table({f"paceline compare {document['script']}": texts}, [1])], _height(texts))


def _facts(document: Document) -> str:
    machine = document["machine"]
    accelerators = (
        f"{machine['accelerators']} × {machine['accelerator']}" if machine["accelerators"] else "no accelerator"
    )
    return (
        f"{_count(document['rounds'], 'round')} of {_count(document['steps'], 'step')} each, the first "
        f"{document['warmup']} not timed; {_count(document['nproc'], 'replica')}; {machine['system']}, "
        f"{_count(machine['cores'], 'core')}, {accelerators}; torch "
        f"{machine['torch']}, Paceline {document['paceline']}; {document['time']}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _figures(rows: Rows, chosen: str | None) -> _Panel:
    columns = {heading: list(map(cell, rows)) for *_, heading, cell in table.COLUMNS}
    colours = ["#dbe9f4" if row["name"] == chosen else "white" for row in rows]
    made = _table(columns, [2.6] + [1] * (len(columns) - 1), colours)
    return _Panel("Figures (-: not measured)", [made], 110 + 28 * len(rows))


def _reasons(rows: Rows) -> _Panel:
    found: list[tuple[str, str, str]] = []
    for heading, key, ran in (
        ("Why losses differ", "loss_difference_cause", True),
        ("Failed in a later round", "failed", True),
        ("Did not run", "failed", False),
    ):
        found += [(heading, row["name"], row[key]) for row in rows if table.ran(row) is ran and row[key]]
    columns = dict(zip(("", "strategy", "why"), zip(*found)))
    return _Panel("", [_table(columns, [1, 1.5, 4])] if found else [], 20 + _height([2 * why for _, _, why in found]))


# ---- charts ----


def _bars(title: str, unit: str, rows: Rows, values: Mapping[str, Sequence[float | None]], *more: Any) -> _Panel:
    """Stacked horizontal bars, one per row. values: name in the legend -> a value for each row. more: other traces."""
    names = [_escaped(row["name"]) for row in rows]
    bars = [
        graph_objects.Bar(x=list(x), y=names, orientation="h", name=name, marker_color=colour)
        for (name, x), colour in zip(values.items(), _COLOURS)
        if any(x)
    ]
    axes = {"title": unit, "rangemode": "tozero"}, {"autorange": "reversed"}
    return _Panel(title, [*bars, *more] if bars else [], 40 + 34 * len(rows), *axes)


def _speed(rows: Rows) -> _Panel:
    rounds = [(value, _escaped(row["name"])) for row in rows for value in row["examples_per_second_by_round"]]
    x, y = zip(*rounds)
    marker = {"color": "black", "symbol": "line-ns-open", "size": 12}
    points = graph_objects.Scatter(x=x, y=y, mode="markers", name="each round", marker=marker)
    median = {"median": [row["examples_per_second"] for row in rows]}
    return _bars("Examples per second", "examples/s", rows, median, points)


def _parts(rows: Rows) -> _Panel:
    kinds = {
        "computing": "compute_seconds",
        "waiting for data": "waiting_for_data_seconds",
        "communicating, without computation": "communicating_seconds",
    }
    steps = {name: [_milliseconds(row["mean_step"][key]) for row in rows] for name, key in kinds.items()}
    steps["computing or communicating (not distinguished)"] = [
        _milliseconds(row["step_seconds"]["mean"] - row["mean_step"]["waiting_for_data_seconds"])
        if row["mean_step"]["compute_seconds"] is None
        else None
        for row in rows
    ]
    return _bars("Mean step time, in milliseconds", "ms", rows, steps)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _memory(rows: Rows) -> _Panel:
    kind = "of tensors" if rows[0]["peak_memory_kind"] == "allocated" else "resident, with torch itself"
    peaks = {"memory": [max(row["peak_memory_bytes_by_rank"]) / 1e6 for row in rows]}
    return _bars(f"Peak memory of the largest rank ({kind})", "MB", rows, peaks)


def _wire(rows: Rows) -> _Panel:
    known = [row for row in rows if row["wire_bytes_per_step"] is not None]
    sent = {"sent": [row["wire_bytes_per_step"] / 1e6 for row in known]}
    return _bars("Bytes sent per step, by all ranks", "MB", known, sent)


def _losses(rows: Rows) -> _Panel:
    losses = [[entry["loss"] for entry in row["losses"]] for row in rows]
    return _lines("Loss", rows, losses, {"title": "mean over the global batch"})


def _differences(rows: Rows) -> _Panel:
    losses = {row["name"]: {(e["epoch"], e["step"]): e["loss"] for e in row["losses"]} for row in rows}
    differences = [
        [abs(loss - losses[row["loss_difference_from"]].get(step, math.nan)) or None for step, loss in own.items()]
        for row, own in zip(rows, losses.values())
    ]
    axis = {"type": "log", "exponentformat": "power", "dtick": 1}
    return _lines("Loss difference from single", rows, differences, axis)


def _lines(title: str, rows: Rows, values: Sequence[Sequence[float | None]], y: Mapping[str, Any]) -> _Panel:
    """A line chart over the steps, with a line for each row that has finite values."""
    lines = [
        graph_objects.Scatter(
            x=list(range(1, len(own) + 1)),
            y=own,
            mode="lines+markers",
            name=_escaped(row["name"]),
            line={"color": _COLOURS[number % len(_COLOURS)], "dash": _DASHES[number % len(_DASHES)]},
        )
        for number, (row, own) in enumerate(zip(rows, values))
        if any(value is not None and math.isfinite(value) for value in own)
    ]
    return _Panel(title, lines, 340, {"title": "step"}, y)
