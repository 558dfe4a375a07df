"""The comparison as one HTML file: the sentence, charts, the table, what did not run.

The page fetches nothing: the charts' library, plotly.js, is inside. It is made from the document that `--json` writes,
so that both say the same.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from paceline.compare import table
from paceline.errors import SettingError

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, which people who see fewer colours can tell apart.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#e69f00", "#009e73", "#888888"
_COLOURS = (_BLUE, "#d55e00", _GREEN, "#cc79a7", _ORANGE, "#56b4e9", "#000000", _GREY)
_DASHES = ("solid", "dash", "dot", "dashdot")

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
.verdict { font-size: 1.15rem; border-left: .3rem solid #0072b2; padding: .3rem 0 .3rem 1rem; margin: 1.2rem 0; }
.facts, .note { color: #555; font-size: .9rem; } code { font-size: .92em; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 8rem; }
td.why { text-align: left; white-space: normal; }
tr.chosen { background: #e8f1f8; }
th .note { display: block; white-space: normal; font-weight: normal; line-height: 1.2; min-width: 4.5rem; }
th { vertical-align: bottom; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem; }
.charts > div { min-width: 0; }
"""

_COLUMNS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("examples/s", "median over the rounds", lambda r: table.number(r["examples_per_second"])),
    ("step, ms", "median", lambda r: table.milliseconds(r["step_seconds"]["median"])),
    ("p95, ms", "95th percentile", lambda r: table.milliseconds(r["step_seconds"]["p95"])),
    ("compute", "ms of a mean step", lambda r: table.milliseconds(r["mean_step"]["compute_seconds"])),
    ("data", "waiting, ms", lambda r: table.milliseconds(r["mean_step"]["waiting_for_data_seconds"])),
    ("comm", "computing nothing, ms", lambda r: table.milliseconds(r["mean_step"]["communicating_seconds"])),
    ("memory", "MB at the peak, a rank", lambda r: f"{max(r['peak_memory_bytes_by_rank']) / 1e6:,.0f}"),
    ("wire", "MB a step, all ranks", lambda r: _wire(r["wire_bytes_per_step"])),
    ("loss", "largest difference", lambda r: table.difference(r["loss_difference"])),
    ("start, s", "to the first step's end", lambda r: f"{r['start_up_seconds']:.1f}"),
)


def check_plotly() -> None:
    """Raises SettingError where plotly cannot be imported."""
    try:
        for name in ("plotly", "plotly.graph_objects", "plotly.io", "plotly.offline"):
            import_module(name)
    except ImportError as error:
        if error.name == "plotly":
            raise SettingError("--html needs plotly, which is not installed: pip install 'paceline[compare]'") from None
        raise SettingError(
            f"--html needs plotly, and it cannot be imported here ({error}): pip install --upgrade 'paceline[compare]'"
        ) from error


def render_page(document: Document) -> str:
    """The whole file."""
    from plotly.offline import get_plotlyjs

    ran = [row for row in document["rows"] if "examples_per_second" in row]
    failed = [row for row in document["rows"] if "examples_per_second" not in row]
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>paceline compare: {_text(document['script'])}</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
        f"<h1>paceline compare <code>{_text(document['script'])}</code></h1>",
        f'<p class="facts">{_facts(document)}</p>',
    ]
    if document["verdict"] is not None:
        parts.append(f'<p class="verdict">{_text(document["verdict"]["sentence"])}</p>')
    elif document["no_verdict"] is not None:
        parts.append(f'<p class="verdict">{_text(document["no_verdict"])}</p>')
    if ran:
        chosen = document["verdict"]["row"] if document["verdict"] is not None else None
        parts.append(f"<h2>Figures</h2>{_table(ran, chosen)}")
        parts.append(f'<h2>Charts</h2><div class="charts">{_charts(ran)}</div>')
    parts.append(_reasons("Why losses differ", [(r, r["loss_difference_cause"]) for r in ran]))
    parts.append(_reasons("What failed in a later round", [(r, r["failed"]) for r in ran]))
    parts.append(_reasons("What did not run", [(r, r["failed"]) for r in failed]))
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _reasons(heading: str, reasons: Sequence[tuple[Mapping[str, Any], str | None]]) -> str:
    """A table of the rows that have a reason; nothing where none has."""
    lines = [
        f'<tr><td>{_name(row)}</td><td class="why">{_text(reason)}</td></tr>'
        for row, reason in reasons
        if reason is not None
    ]
    return f"<h2>{heading}</h2><table>{''.join(lines)}</table>" if lines else ""


def _text(value: object) -> str:
    return html.escape(str(value))


def _name(row: Mapping[str, Any]) -> str:
    """The name of a row, with places at which a line may break."""
    return re.sub(r"([:,])", r"\1<wbr>", _text(row["name"]))


def _wire(count: float | None) -> str:
    return table.NOT_MEASURED if count is None else table.megabytes(count)


def _facts(document: Document) -> str:
    machine = document["machine"]
    accelerators = (
        f"{machine['accelerators']} × {machine['accelerator']}" if machine["accelerators"] else "no accelerator"
    )
    facts = (
        f"{_count(document['rounds'], 'round')} of {_count(document['steps'], 'step')} each, the first "
        f"{document['warmup']} not timed; {_count(document['nproc'], 'replica')}; {machine['system']}, "
        f"{_count(machine['cores'], 'core')}, {accelerators}; torch "
        f"{machine['torch']}, Paceline {document['paceline']}; {document['time']}"
    )
    return _text(facts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(rows: Rows, chosen: str | None) -> str:
    heads = "".join(f'<th>{_text(name)}<span class="note">{_text(unit)}</span></th>' for name, unit, _ in _COLUMNS)
    lines = [f"<tr><th>strategy</th>{heads}</tr>"]
    for row in rows:
        mark = ' class="chosen"' if row["name"] == chosen else ""
        cells = "".join(f"<td>{_text(cell(row))}</td>" for _, _, cell in _COLUMNS)
        lines.append(f"<tr{mark}><td>{_name(row)}</td>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div><p class="note">-: not measured.</p>'


# --- charts


def _charts(rows: Rows) -> str:
    from plotly import graph_objects, io

    figures = [_speed(graph_objects, rows), _parts(graph_objects, rows), _memory(graph_objects, rows)]
    figures += [_wires(graph_objects, rows), _losses(graph_objects, rows), _differences(graph_objects, rows)]
    options = {"displayModeBar": False, "responsive": True}
    return "\n".join(
        "<div>" + io.to_html(figure, full_html=False, include_plotlyjs=False, config=options) + "</div>"
        for figure in figures
        if figure is not None
    )


def _figure(library: Any, title: str, traces: Sequence[Any], height: int, **layout: Any) -> Any:
    """A chart. Its legend, if it has one, stands below the axis, with a line for each trace."""
    legend = 22 * len(traces) if len(traces) > 1 or layout.get("showlegend") else 0
    figure = library.Figure(traces)
    figure.update_layout(
        title={"text": title, "font": {"size": 16}, "x": 0, "y": 1, "yref": "container", "pad": {"t": 6, "l": 4}},
        template="plotly_white",
        height=height + legend,
        margin={"l": 10, "r": 16, "t": 40, "b": 56 + legend},
        legend={"x": 0, "y": -52 / (height - 96), "yanchor": "top"},
        font={"family": "system-ui, sans-serif", "size": 13},
        **layout,
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def _bars(library: Any, title: str, rows: Rows, traces: Sequence[Any], unit: str) -> Any:
    """Horizontal bars, in the order of the table from above."""
    axes = {"xaxis": {"title": unit, "rangemode": "tozero"}, "yaxis": {"autorange": "reversed"}}
    return _figure(library, title, traces, 110 + 34 * len(rows), barmode="stack", **axes)


def _names(rows: Rows) -> list[str]:
    """The rows' names, escaped: Plotly takes some HTML in labels."""
    return [_text(row["name"]) for row in rows]


def _speed(library: Any, rows: Rows) -> Any:
    names = _names(rows)
    values = [row["examples_per_second"] for row in rows]
    rounds = [(name, value) for name, row in zip(names, rows) for value in row["examples_per_second_by_round"]]
    bars = library.Bar(x=values, y=names, orientation="h", marker_color=_BLUE, name="median")
    points = library.Scatter(
        x=[value for _, value in rounds],
        y=[name for name, _ in rounds],
        mode="markers",
        name="each round",
        marker={"color": "#1c1c1c", "symbol": "line-ns-open", "size": 12},
    )
    return _bars(library, "Examples per second", rows, [bars, points], "examples/s")


def _parts(library: Any, rows: Rows) -> Any:
    kinds = (
        ("compute_seconds", "computing", _BLUE),
        ("waiting_for_data_seconds", "waiting for data", _ORANGE),
        ("communicating_seconds", "communicating, computing nothing", _GREEN),
    )
    traces = []
    for key, name, colour in kinds:
        values = [None if row["mean_step"][key] is None else 1e3 * row["mean_step"][key] for row in rows]
        traces.append(library.Bar(x=values, y=_names(rows), orientation="h", name=name, marker_color=colour))
    rest = [
        1e3 * (row["step_seconds"]["mean"] - row["mean_step"]["waiting_for_data_seconds"])
        if row["mean_step"]["compute_seconds"] is None
        else None
        for row in rows
    ]
    if any(value is not None for value in rest):
        name = "computing or communicating (not told apart)"
        traces.append(library.Bar(x=rest, y=_names(rows), orientation="h", name=name, marker_color=_GREY))
    return _bars(library, "A mean step, in milliseconds", rows, traces, "ms")


def _memory(library: Any, rows: Rows) -> Any:
    values = [max(row["peak_memory_bytes_by_rank"]) / 1e6 for row in rows]
    kind = "of tensors" if rows[0]["peak_memory_kind"] == "allocated" else "resident, with torch itself"
    bars = library.Bar(x=values, y=_names(rows), orientation="h", marker_color=_BLUE)
    return _bars(library, f"Peak memory of the largest rank ({kind})", rows, [bars], "MB")


def _wires(library: Any, rows: Rows) -> Any:
    known = [row for row in rows if row["wire_bytes_per_step"] is not None]
    if not any(row["wire_bytes_per_step"] for row in known):
        return None
    values = [row["wire_bytes_per_step"] / 1e6 for row in known]
    bars = library.Bar(x=values, y=_names(known), orientation="h", marker_color=_BLUE)
    return _bars(library, "Sent in a step, by all ranks", known, [bars], "MB")


def _losses(library: Any, rows: Rows) -> Any:
    traces = []
    for number, row in enumerate(rows):
        losses = [entry["loss"] for entry in row["losses"]]
        if losses:
            traces.append(_line(library, number, row["name"], [v if math.isfinite(v) else None for v in losses]))
    if not traces:
        return None
    axes = {"xaxis": {"title": "step"}, "yaxis": {"title": "mean over the global batch"}}
    return _figure(library, "Loss", traces, 340, **axes)


def _differences(library: Any, rows: Rows) -> Any:
    losses = {row["name"]: {(e["epoch"], e["step"]): e["loss"] for e in row["losses"]} for row in rows}
    traces = []
    for number, row in enumerate(rows):
        base = losses.get(row["loss_difference_from"], {})
        pairs = [(value, base.get(key)) for key, value in losses[row["name"]].items()]
        values = [abs(a - b) if a is not None and b is not None and a != b else None for a, b in pairs]
        if any(value is not None and math.isfinite(value) for value in values):
            traces.append(_line(library, number, row["name"], values, "lines+markers"))
    if not traces:
        return None
    axes = {"xaxis": {"title": "step"}, "yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}}
    return _figure(library, "How far the loss is from that of single", traces, 340, showlegend=True, **axes)


def _line(library: Any, number: int, name: str, values: Sequence[float | None], mode: str = "lines") -> Any:
    style = {"color": _COLOURS[number % len(_COLOURS)], "dash": _DASHES[number % len(_DASHES)], "width": 2}
    steps = list(range(1, len(values) + 1))
    return library.Scatter(x=steps, y=values, mode=mode, name=_text(name), line=style)
