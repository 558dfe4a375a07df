"""Measure from a profiler's trace how much communication overlaps with the backward. Does not import torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

NODE = "autograd::engine::evaluate_function: "
ACCUMULATES = NODE + "torch::autograd::AccumulateGrad"  # its hooks start the communication; it does not compute
LAUNCHES = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]  # of a trace's "traceEvents"
Span = tuple[float, float]  # begin and end, in microseconds


def overlap(events: Sequence[Event]) -> dict[str, float]:
    """The part of a step's communication that ran before the end of its backward's computation.

    On a GPU the backward consists of the kernels that autograd's nodes launch (a kernel and its launch share a
    correlation number), and communication consists of NCCL's kernels. On a CPU these are the nodes themselves, and
    gloo's events of its collectives. Communication before the backward, such as of counts, is left out.

    Returns {"collectives": their number, "begun within the backward": the number begun in it, "communication, us":
    their time, "hidden, us": the part of it before the backward's end, "backward, us"}.

    Raises ValueError if the trace has no backward.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    nodes = [event for event in whole if event["name"].startswith(NODE) and event["name"] != ACCUMULATES]
    kernels = [event for event in whole if event.get("cat") == "kernel"]
    if kernels:
        launched = _launched_by(nodes, [event for event in whole if event.get("cat") in LAUNCHES])
        sent = [event for event in kernels if "nccl" in event["name"].lower()]
        others = [event for event in kernels if "nccl" not in event["name"].lower()]
        computed = [event for event in others if event["args"].get("correlation") in launched]
    else:
        sent = [event for event in whole if event["name"].startswith("gloo:")]
        computed = nodes
    if not computed:
        raise ValueError("the trace has no backward: no kernel and no operator that a node of autograd has started")
    begin, end = min(map(_begin, computed)), max(map(_end, computed))
    after = [event for event in sent if _begin(event) >= begin]
    return {
        "collectives": len(after),
        "begun within the backward": sum(_begin(event) < end for event in after),
        "communication, us": sum(event["dur"] for event in after),
        "hidden, us": sum(max(0.0, min(_end(event), end) - _begin(event)) for event in after),
        "backward, us": end - begin,
    }


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _launched_by(nodes: Sequence[Event], launches: Sequence[Event]) -> set[int]:
    """The correlation numbers of the launches in a node, on its thread. Nodes of one thread do not nest."""
    spans: dict[Any, list[Span]] = {}
    for node in nodes:
        spans.setdefault(node["tid"], []).append((_begin(node), _end(node)))
    for own in spans.values():
        own.sort()
    found = set()
    for launch in launches:
        own = spans.get(launch["tid"], [])
        before = bisect_right(own, (_begin(launch), float("inf"))) - 1
        if before >= 0 and _begin(launch) < own[before][1]:
            found.add(launch["args"].get("correlation"))
    return found
