"""Compare `paceline plan` with runs: on this machine, and with figures that others have published.

    python benchmarks/plan_check.py --json benchmarks/results/plan_check.json            # 15 minutes on two cores
    python benchmarks/plan_check.py --part public --json FILE                            # one part; the others stay

memory   The most bytes in tensors during a step, on 1, 2 and 4 processes of this machine, as torch's MemTracker counts
         them, for two models under ddp and fsdp. The plan is made from one process. Left out on both sides: `other`
         (interpreter and libraries).
time     Seconds of a step and bytes that a process sends, of the same models. The rate and the latency of gloo between
         the processes are measured by two all-reduces, a small and a large one. Each process has one thread. If there
         are more processes than cores, each is slower than the measured process by cores / processes. Runs are trials
         of `paceline compare`, in rounds: each round measures the single process and every case once. Other programs
         may run at the same time, so a step's time is that of the fastest quarter of a trial's steps, in the fastest
         round. The same holds for the plan's seconds and for the links.
public   Tokens per second of public training runs, from the model's sizes alone: FLOPs as torch's counter counts them
         (twice the forward for the backward; whole attention, without the causal half), with recomputed products.
         Nothing was fitted to these runs: the fraction of the peak is the table of other runs in
         paceline/planning/device_figures.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collate_draws import machine

from paceline.compare.cases import Case
from paceline.compare.rounds import run_trial
from paceline.config import parse_strategy
from paceline.launcher.interrupts import Interrupts
from paceline.planning.cluster import Cluster, ClusterOptions
from paceline.planning.cost_model import Job
from paceline.planning.device_figures import A100_FRACTION, DEVICES, H100_FRACTION
from paceline.planning.measurement import Layer, Measurement
from paceline.planning.plan_command import PlanOptions, cost_of, measure
from paceline.trials.start import Length, Script

HERE = Path(__file__).parent
JOB = HERE / "plan_job.py"
STEPS, WARMUP = 10, 2
STRATEGIES = ("ddp:reducer=native", "fsdp:stage=1", "fsdp:stage=3")
BARS = {"memory": 0.05, "seconds": 0.15, "public": 0.25}


# --- this machine


def probe(processes: int) -> dict[str, float]:
    """Seconds of gloo's all-reduce of a small and a large tensor; from these, the latency and the rate of a ring."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), str(JOB), "probe"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(printed.strip().splitlines()[-1])
    n, size = processes, found["large_bytes"]
    latency = found["small_seconds"] / (2 * (n - 1))
    rate = 2 * (n - 1) / n * size / max(found["large_seconds"] - found["small_seconds"], 1e-9)
    return {"latency_seconds": latency, "bytes_per_second": rate}


def fast(seconds: list[float]) -> float:
    """The mean of the fastest quarter."""
    ordered = sorted(seconds)
    return statistics.fmean(ordered[: max(len(ordered) // 4, 1)])


def fastest(measured: Measurement) -> Measurement:
    """The measurement with the fastest quarter of its steps only."""
    names = ("forward", "backward", "update", "other")
    totals = [sum(parts) for parts in zip(*(getattr(measured, name) for name in names), strict=True)]
    chosen = sorted(range(len(totals)), key=totals.__getitem__)[: max(len(totals) // 4, 1)]
    return replace(measured, **{name: [getattr(measured, name)[i] for i in chosen] for name in names})


def check_time(model: str, sizes: list[int], turns: int) -> list[dict[str, Any]]:
    """Predicted and measured figures of one model."""
    script = Script(str(JOB), (model,), False, {"device": "cpu"})
    cases = [("single", 1)] + [(name, n) for n in sizes if n > 1 for name in STRATEGIES]
    singles: list[Measurement] = []
    probes: dict[int, list[dict[str, float]]] = {n: [] for n in sizes if n > 1}
    runs: dict[tuple[str, int], list[Any]] = {case: [] for case in cases}
    length = Length(STEPS, WARMUP, 300.0)
    with Interrupts() as interrupts:
        for turn in range(turns):
            found = measure(script, PlanOptions(script, ClusterOptions(), steps=STEPS - WARMUP), interrupts)
            assert isinstance(found, Measurement), found
            singles.append(fastest(found))
            for n in probes:
                probes[n].append(probe(n))
            for name, n in cases:
                case = Case(name, parse_strategy(name), n)
                records = run_trial(script, case, length, interrupts)
                assert isinstance(records, list), records
                runs[name, n].append(records)
                print(f"round {turn + 1}: {model}, {name}, {n} processes", file=sys.stderr, flush=True)
    measured = min(singles, key=lambda one: sum(one.forward) + sum(one.backward) + sum(one.update))
    rows = []
    for (name, n), rounds in runs.items():
        links = probes.get(n) or [{"latency_seconds": 0.0, "bytes_per_second": 1.0}]
        cluster = Cluster(
            1,
            n,
            bandwidth=max(link["bytes_per_second"] for link in links),
            latency=min(link["latency_seconds"] for link in links),
            speed=min(1.0, (os.cpu_count() or 1) / n),
            shares_cores=True,
        )
        cost = cost_of(parse_strategy(name), Job(measured, cluster, measured.examples))
        seconds = cost.seconds(cluster)
        steps = [
            fast([s["seconds"] - s["waited"] for r in records for s in r["steps"] if s["timed"]]) for records in rounds
        ]
        sent = [max(record["bytes_sent"] or 0 for record in records) / (STEPS - WARMUP) for records in rounds]
        rows.append({
            "model": model,
            "strategy": name,
            "processes": n,
            "link": {"bytes_per_second": cluster.bandwidth, "latency_seconds": cluster.latency} if n > 1 else None,
            "step_seconds": compared(seconds.middle, min(steps), "seconds")
            | {"low": seconds.low, "high": seconds.high, "measured_by_round": steps},
            "sent_bytes": {"predicted": cost.sent_bytes, "measured": statistics.median(sent)},
        })  # fmt: skip
    return rows


def compared(predicted: float, measured: float, bar: str) -> dict[str, Any]:
    error = predicted / measured - 1
    return {"predicted": predicted, "measured": measured, "error": error, "within": abs(error) <= BARS[bar]}


def check_memory(model: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Predicted and counted bytes of one model."""
    script = Script(str(JOB), (model,), False, {"device": "cpu"})
    with Interrupts() as interrupts:
        measured = measure(script, PlanOptions(script, ClusterOptions(), steps=3), interrupts)
    assert isinstance(measured, Measurement), measured
    rows = []
    for name, n in [("single", 1)] + [(name, n) for n in sizes if n > 1 for name in STRATEGIES]:
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(n), "--strategy", name, "--device", "cpu"]
        printed = subprocess.run([*command, str(JOB), model, "memory"], check=True, capture_output=True, text=True)
        counted = max(json.loads(printed.stdout.strip().splitlines()[-1]))
        cluster = Cluster(1, n, bandwidth=1e9, shares_cores=True)
        memory = cost_of(parse_strategy(name), Job(measured, cluster, measured.examples)).memory
        predicted = memory.total.middle - memory.other
        row = {"model": model, "strategy": name, "processes": n, "bytes": compared(predicted, counted, "memory")}
        rows.append(row | {"parts": memory._asdict()})
        print(f"{model}, {name}, {n} processes: {row['bytes']}, {memory}", file=sys.stderr, flush=True)
    return rows


# --- figures of others


@dataclass(frozen=True)
class Transformer:
    """A decoder. Its FLOPs and sizes follow from these numbers."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int  # width of the MLP
    gated: bool  # three matrices in the MLP, not two
    vocabulary: int
    length: int  # tokens of an example
    tied: bool = False
    recomputed: float = 0.0  # part of the layers' matrix products that the backward computes again

    @property
    def layer_parameters(self) -> int:
        attention = self.width * self.width * (2 + 2 * self.key_heads / self.heads)
        return int(attention + (3 if self.gated else 2) * self.width * self.inner)

    @property
    def head(self) -> int:
        return self.vocabulary * self.width

    def measurement(self) -> Measurement:
        """A measurement of one example, without seconds: fp32 weights, AdamW, bf16 computation."""
        forward = 2 * self.layer_parameters * self.length + 4 * self.width * self.length**2
        products = 2 * self.layer_parameters * self.length
        flops = 3 * forward + self.recomputed * products
        saved = self._saved()
        layer = Layer(
            "block", 4 * self.layer_parameters, 4 * self.layer_parameters, saved, 2 * self.width * self.length, flops
        )
        outside = 4 * self.head * (1 if self.tied else 2)
        total = self.layers * layer.parameter_bytes + outside
        logits = self.vocabulary * self.length * (2 + 4 + 4)  # bf16, their fp32 copy, and the softmax's result
        return Measurement(
            "", "cpu", "bf16", 1, None, [0.0], [0.0], [0.0], [0.0], total, total, 2 * total, 0, total / 2, logits, 0,
            self.layers * flops + 6 * self.head * self.length, [layer] * self.layers,
        )  # fmt: skip

    def _saved(self) -> float:
        """Bytes that a layer saves for one example: the input, and outputs of matrix products and attention in bf16.

        With recomputation: the products that are not computed again, and the layer's input.
        """
        products = (
            self.width * (2 + 2 * self.key_heads / self.heads) + (2 if self.gated else 1) * self.inner + self.width
        )
        return 2 * self.length * (2 * self.width + products * (1 - self.recomputed))


LLAMA_8B = Transformer(32, 4096, 32, 8, 14336, True, 128256, 8192, recomputed=0.5)


@dataclass(frozen=True)
class Published:
    """A figure of others, with all settings that the plan needs."""

    name: str
    model: Transformer
    gpu: str
    nodes: int
    node_bandwidth: float | None
    strategy: str
    examples: int  # of a global batch
    micro_batch: int | None
    tokens_per_second: float  # of a device
    source: str
    note: str = ""
    memory_gib: float | None = None  # as the source reports it


_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bf"
_TITAN_NOTE = (
    "H100 with HBM2e and a limit of 500 W: its peak is below the data sheet's, as the source says. The tables name no "
    "sequence length; 8192 is that of torchtitan's configuration of this model."
)
_NANOCHAT_NOTE = "Compiled; Muon and AdamW with sharded state, planned as stage 1."
NANOCHAT_20 = Transformer(20, 1280, 10, 10, 5120, False, 65536, 2048)
_MEGATRON = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
_MEGATRON_NOTE = (
    "The paper gives TFLOP/s by its equation 3, with recomputed layers; tokens per second follow from that. Each node "
    "has 8 links of 200 Gbit/s."
)


def tokens_of(teraflops: float, layers: int, width: int) -> float:
    """Tokens per second of a device, from that paper's TFLOP/s: 2,048 tokens, a vocabulary of 51,200."""
    a_token = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
    return 1e12 * teraflops / a_token


GPT_175B = Transformer(96, 12288, 96, 96, 49152, False, 51200, 2048, tied=True, recomputed=1.0)
PUBLISHED = (
    Published("Llama 3.1 8B, 8 H100, eager", LLAMA_8B, "h100", 1, None, "fsdp:stage=3,mixed=bf16", 16, None, 5762,
              f"{_TITAN}, table 1", _TITAN_NOTE, 82.4),
    Published("Llama 3.1 8B, 8 H100, compiled", LLAMA_8B, "h100", 1, None, "fsdp:stage=3,mixed=bf16", 16, None, 6667,
              f"{_TITAN}, table 1", _TITAN_NOTE, 77.0),
    Published("Llama 3.1 8B, 128 H100, eager", LLAMA_8B, "h100", 16, 400e9, "fsdp:stage=3,mixed=bf16", 256, None, 5605,
              f"{_TITAN}, table 3", _TITAN_NOTE, 67.0),
    Published("Llama 3.1 8B, 128 H100, compiled", LLAMA_8B, "h100", 16, 400e9, "fsdp:stage=3,mixed=bf16", 256, None,
              6514, f"{_TITAN}, table 3", _TITAN_NOTE, 62.0),
    Published("nanochat d20, 8 A100", NANOCHAT_20, "a100", 1, None, "fsdp:stage=1", 256, 32, 528_000 / 8,
              "karpathy/nanochat, pull request 147 (log of steps 4 to 11)", _NANOCHAT_NOTE),
    Published("nanochat d20, 8 H100", NANOCHAT_20, "h100", 1, None, "fsdp:stage=1", 256, 32, 1_076_500 / 8,
              "karpathy/nanochat, Introducing nanochat (log of steps 3 to 13)", _NANOCHAT_NOTE),
    Published("nanochat d32, 8 H100", Transformer(32, 2048, 16, 16, 8192, False, 65536, 2048), "h100", 1, None,
              "fsdp:stage=1", 256, 8, 524_288 / 1.574 / 8, "karpathy/nanochat, run1000.sh, commit 06a1977",
              _NANOCHAT_NOTE),
    Published("Megatron-LM, GPT 1.7B, 32 A100", Transformer(24, 2304, 24, 24, 9216, False, 51200, 2048, True, 1.0),
              "a100", 4, 200e9, "ddp", 512, None, tokens_of(137, 24, 2304), f"{_MEGATRON}, table 1", _MEGATRON_NOTE),
    *(Published(f"DeepSpeed ZeRO-3, GPT 175B, {nodes * 8} A100", GPT_175B, "a100", nodes, 200e9,
                "fsdp:stage=3,mixed=bf16", 1536, None, tokens_of(teraflops, 96, 12288), f"{_MEGATRON}, table 2",
                _MEGATRON_NOTE) for nodes, teraflops in ((48, 144), (96, 88), (192, 44))),
)  # fmt: skip


def check_published(case: Published) -> dict[str, Any]:
    """Predicted and published tokens per second of a device."""
    figures = DEVICES[case.gpu]
    fraction = H100_FRACTION if case.gpu == "h100" else A100_FRACTION
    cluster = Cluster(
        case.nodes, 8, figures.memory, figures.bandwidth, case.node_bandwidth, flops=figures.flops, fraction=fraction
    )
    measured = replace(case.model.measurement(), micro_batch=case.micro_batch)
    cost = cost_of(parse_strategy(case.strategy), Job(measured, cluster, case.examples))
    tokens = case.examples * case.model.length / cluster.size
    seconds = cost.seconds(cluster)
    found = compared(tokens / seconds.middle, case.tokens_per_second, "public")
    inside = tokens / seconds.high <= case.tokens_per_second <= tokens / seconds.low
    return {
        "name": case.name,
        "strategy": case.strategy,
        "tokens_per_second": found | {"low": tokens / seconds.high, "high": tokens / seconds.low, "inside": inside},
        "memory_gib": {"predicted": cost.memory.total.middle / 2**30, "published": case.memory_gib},
        "parameters": measured.parameter_bytes / 4,
        "flops_per_token": (measured.flops or 0.0) / case.model.length,
        "source": case.source,
        "note": case.note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "plan_check.json")
    parser.add_argument("--part", choices=("memory", "time", "public"), help="default: all")
    parser.add_argument("--models", default="mlp,gpt", metavar="NAME,...")
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    document: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    os.environ["OMP_NUM_THREADS"] = "1"  # of all trials
    began, load = datetime.datetime.now(datetime.timezone.utc), os.getloadavg()
    about = {"time": began.isoformat(timespec="seconds")}
    document |= {"command": "python benchmarks/plan_check.py", **about, "machine": machine()}
    if options.part in (None, "public"):
        document["public"] = about | {"bar": BARS["public"], "rows": [check_published(case) for case in PUBLISHED]}
    sizes = [int(n) for n in options.processes.split(",")]
    if options.part in (None, "memory"):
        rows = [row for model in options.models.split(",") for row in check_memory(model, sizes)]
        document["memory"] = about | {"bar": BARS["memory"], "rows": rows}
    if options.part in (None, "time"):
        start = time.monotonic()
        rows = [row for model in options.models.split(",") for row in check_time(model, sizes, options.rounds)]
        document["time_of_a_step"] = about | {
            "bar": BARS["seconds"],
            "load_average": {"before": load[0], "after": os.getloadavg()[0]},
            "minutes": (time.monotonic() - start) / 60,
            "rows": rows,
        }
    options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
