"""NCCL with one rank; two ranks on one GPU, over gloo; several replicas of one process on one GPU."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu import jobs
from benchmarks.gpu.check import CheckFault, Place, Steps, check
from benchmarks.gpu.jobs import Job, Way

import paceline
from paceline.comm import transport
from paceline.comm.mesh import world_group
from paceline.torch_private import flight_recorder


@check("ranks", 90, ranks=1)
def a_call_that_is_queued_is_told(place: Place) -> Steps:
    """NCCL's calls in a stall's message: a call that waits for the GPU is pending, and then ends."""
    gpu = place.device.type == "cuda"
    yield f"torch's flight recorder: an all_reduce of {'NCCL, queued behind products' if gpu else 'gloo'}"
    if gpu:
        torch.cuda.set_device(place.device)
    dist.init_process_group("nccl" if gpu else "gloo", rank=0, world_size=1,
                            init_method=f"file://{place.folder}/meeting")  # fmt: skip
    total = torch.ones(2, 3, device=place.device)
    dist.all_reduce(total)
    size, products = (8192, 200) if gpu else (8, 1)
    matrix = torch.ones(size, size, device=place.device)
    for _ in range(products):
        matrix = matrix @ matrix
    dist.all_reduce(total)
    began = time.monotonic()
    queued = [one.under_way for one in flight_recorder.read()]
    seconds = time.monotonic() - began
    if gpu:
        torch.cuda.synchronize()
    while any(one.under_way for one in flight_recorder.read()) and time.monotonic() < began + 60.0:
        time.sleep(0.1)  # torch's watchdog polls for finished calls
    (after,) = flight_recorder.read()
    yield {"title": after.title, "queued": [str(call) for call in queued], "seconds to read": round(seconds, 4)}
    assert after.under_way is None
    assert [call.numbered for call in after.ended][-1] == "call 2, all_reduce of float32 [2, 3]", after
    if gpu:
        assert [call.numbered for call in queued if call is not None] == ["call 2, all_reduce of float32 [2, 3]"]
    dist.destroy_process_group()


@check("ranks", 90, ranks=1)
def collectives_with_one_rank(place: Place) -> Steps:
    """Call the collectives directly in seven dtypes, since a world of one skips communication."""
    yield "all_reduce, gather, all_gather and the two of bytes of comm/transport.py, in a group of one rank"
    run = paceline.start(device=str(place.device), progress="off")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.device.type == "cuda" else "gloo", rank=0, world_size=1,
                                init_method=f"file://{place.folder}/meeting", device_id=None)  # fmt: skip
    group, done = dist.group.WORLD, []
    assert group is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        given = torch.arange(6, device=place.device).to(dtype)
        tensor = given.clone()
        work = transport.all_reduce(tensor, dist.ReduceOp.SUM, group)
        if work is not None:
            work.wait()
        assert torch.equal(tensor, given), f"all_reduce of {dtype}"
        assert torch.equal(transport.gather(given, group)[0], given), f"gather of {dtype}"
        assert torch.equal(transport.all_gather(given, group), given), f"all_gather of {dtype}"
        done.append(str(dtype))
    for message in (b"short", bytes(range(256)) * 40):
        assert [bytes(got) for got in transport.gather_bytes(message, place.device, group)] == [message]
        assert bytes(transport.broadcast_bytes(message, 0, place.device, group)) == message
    assert world_group().broadcast("x") == "x"
    world_group().barrier()
    yield {"backends": world_group().backends, "dtypes": done}
    run.close()


Case = tuple[Job, Way, "dict[str, Any]"]  # the settings of paceline.start
WAIT_SECONDS = 60.0  # for the other ranks at the end of a case


def over_ranks(place: Place, cases: dict[str, Case]) -> Steps:
    """Train each case with all ranks, and on rank 0 in a plain loop over the global batches.

    If a case raises on all ranks, or at its start, the other cases still run. If a rank waits for a rank that has
    raised, it cannot recover: the remaining cases are listed as not run."""
    yield f"{len(cases)} cases: " + ", ".join(cases)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wrong: list[str] = []
    for number, (name, (job, way, settings)) in enumerate(cases.items()):
        error, trained = "", None
        try:
            trained = trained_by_ranks(place, f"weights of case {number}", job, way, settings)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        try:
            errors = exchanged(place.shared, f"end of case {number}", error, rank, size)
        except TimeoutError as late:
            left = list(cases)[number + 1 :]
            wrong.append(f"{name}: {error or late}; not run after it: {', '.join(left) or 'none'}")
            break
        if any(errors):
            wrong.append(f"{name}: " + "; ".join(f"rank {of}: {text}" for of, text in enumerate(errors) if text))
        elif rank == 0 and trained is not None:
            mine, order, backends = trained
            apart = jobs.share(mine, *map(jobs.weights, (jobs.plain(job, way, order, place.device), job.make())))
            limit = jobs.limit(way.precision)
            yield {name: {"difference": apart, "limit": limit, "backends": backends}}
            wrong += [f"{name}: {apart:.1e}"] * (not apart <= limit)
    assert not wrong, "differ by more than the limit, or failed: " + "; ".join(wrong)


def exchanged(folder: Path, what: str, own: str, rank: int, size: int, wait: float = WAIT_SECONDS) -> list[str]:
    """Gather a value of each rank, in rank order. Uses files, since a process group may be unusable after an error.

    Raises TimeoutError if a rank writes nothing for `wait` seconds."""
    part = folder / f"part of {what}.{rank}"
    part.write_text(own)
    part.rename(folder / f"{what}.{rank}")
    paths = [folder / f"{what}.{of}" for of in range(size)]
    end = time.monotonic() + wait
    while silent := [of for of, path in enumerate(paths) if not path.exists()]:
        if time.monotonic() > end:
            raise TimeoutError(f"rank {', '.join(map(str, silent))} did not come to its end in {wait:.0f} s")
        time.sleep(0.02)
    return [path.read_text() for path in paths]


def trained_by_ranks(
    place: Place, title: str, job: Job, way: Way, settings: dict[str, Any]
) -> tuple[list[torch.Tensor], jobs.Order, str]:
    """(weights from run.export, the examples of each global batch, backends) of a run. title: used in file names."""
    run = paceline.start(device=str(place.device), progress="off", tf32=False, precision=way.precision, **settings)
    try:
        models, order, _ = jobs.ours(run, job, way)
        whole = [[[i for rank in ranks for part in rank for i in part]]
                 for ranks in zip(*world_group().gather(order), strict=True)]  # fmt: skip
        weights = []
        for number, (model, fresh) in enumerate(zip(models, job.make(), strict=True)):
            weights += exported(run, place.shared / f"{title}.{number}", model, fresh)
        return weights, whole, world_group().backends
    finally:
        run.close()


def exported(run: paceline.Run, path: Path, model: Any, fresh: torch.nn.Module) -> list[torch.Tensor]:
    """The whole weights in the order of jobs.weights([fresh])."""
    from safetensors.torch import load_file

    run.export(path, model)
    world_group().barrier()
    state = load_file(path)
    names = {tensor: name for name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]}
    return [state[names[tensor]] for tensor in jobs.weights([fresh])]


def strategies() -> dict[str, Case]:
    """The strategies with which two ranks train the same model as one device."""
    mlp = jobs.MLP, Way()
    named = {f"ddp:reducer={name}": ("ddp", {"reducer": name}) for name in ("ring", "hierarchical", "reduce_to_one")}
    cases = {"ddp": (*mlp, {"strategy": "ddp"})}
    cases |= {name: (*mlp, {"strategy": paceline.strategy(way, **options)}) for name, (way, options) in named.items()}
    cases["ddp, a gan"] = (jobs.GAN, Way(), {"strategy": "ddp"})
    cases["ddp, batch norm"] = (jobs.CONV, Way(), {"strategy": "ddp"})
    cases["ddp, clipped"] = (jobs.MLP, Way(clip=0.05), {"strategy": "ddp"})
    cases["local_sgd:every=1"] = (
        replace(jobs.MLP, data=even_data), Way(), {"strategy": "local_sgd:every=1,average_state=true"})  # fmt: skip
    return cases


def even_data() -> Any:
    """64 examples: each global batch of 16 is split into equal halves."""
    data = jobs.mlp_data()
    return torch.utils.data.TensorDataset(*(column[:64] for column in data.tensors))


@check("ranks", 300, ranks=2)
def two_ranks_on_one_gpu(place: Place) -> Steps:
    yield from over_ranks(place, strategies())


SHARDED = (*(f"fsdp:stage={stage}" for stage in (1, 2, 3)), "tensor:size=2")


@check("ranks", 200, ranks=2)
def sharded_tensors_on_one_gpu(place: Place) -> Steps:
    """Strategies with sharded tensors must be refused if two ranks share a GPU, since torch's collectives would crash.

    On CPUs they train.
    """
    gpt = jobs.GPT, Way(count="tensor")
    if place.device.type != "cuda":
        yield from over_ranks(place, {name: (*gpt, {"strategy": name}) for name in SHARDED})
        return
    yield f"refused, with the remedy: {', '.join(SHARDED)}"
    told = {}
    for name in SHARDED:
        try:
            paceline.start(device=str(place.device), progress="off", strategy=name).close()
            told[name] = "it started"
        except paceline.errors.SettingError as error:
            told[name] = str(error)
    yield told
    wrong = [f"{name}: {text}" for name, text in told.items() if "processes that share a GPU" not in text]
    assert not wrong, "; ".join(wrong)


ALONE = (
    "ddp", "data_parallel", "mirrored", "central_storage", "shared", "fsdp:stage=1", "fsdp:stage=2", "fsdp:stage=3",
    "fsdp:offload=true", "fsdp:checkpointing=true,min_params=0", "fsdp+tensor", "tensor", "pipeline", "local_sgd",
    "parameter_server",
)  # fmt: skip


@check("ranks", 300, ranks=1)
def every_strategy_with_one_process(place: Place) -> Steps:
    gpt = jobs.GPT, Way("closure", count="tensor")
    yield from over_ranks(place, {name: (*gpt, {"strategy": name}) for name in ALONE})


@check("ranks", 200, ranks=2)
def two_ranks_in_16_bits(place: Place) -> Steps:
    yield from over_ranks(
        place,
        {f"ddp {precision}": (jobs.GPT, Way(count="tensor", precision=precision), {"strategy": "ddp"})
         for precision in ("bf16", "fp16")},
    )  # fmt: skip


@check("ranks", 200)
def replicas_of_one_process(place: Place) -> Steps:
    """Two and three replicas on one device. Their threads exchange the sums of batch norm."""
    device = str(place.device)
    names = {f"{name} of {count}": (name, "+".join([device] * count)) for name, count in
             (("data_parallel", 2), ("data_parallel", 3), ("mirrored", 2), ("central_storage", 2))}  # fmt: skip
    jobs_of = {"perceptron": jobs.MLP, "batch norm": jobs.CONV}
    cases = {f"{name}, {title}": (job, Way("closure"), {"strategy": f"{strategy}:devices={devices}"})
             for name, (strategy, devices) in names.items() for title, job in jobs_of.items()}  # fmt: skip
    yield from in_one_process(place, cases)


def in_one_process(place: Place, cases: dict[str, Case]) -> Steps:
    yield f"{len(cases)} cases: " + ", ".join(cases)
    wrong = []
    for name, (job, way, settings) in cases.items():
        try:
            run = paceline.start(device=str(place.device), progress="off", tf32=False, **settings)
            try:
                models, order, _ = jobs.ours(run, job, way)
            finally:
                run.close()
            flat = [[[i for part in parts for i in part]] for parts in order]
            apart = jobs.apart(models, jobs.plain(job, way, flat, place.device), job.make())
            yield {name: {"difference": apart, "limit": jobs.LIMIT}}
            wrong += [f"{name}: {apart:.1e}"] * (not apart <= jobs.LIMIT)
        except CheckFault:
            raise
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "differ by more than the limit, or failed: " + "; ".join(wrong)


@check("ranks", 120)
def reproducible_on_one_rank(place: Place) -> Steps:
    yield "reproducible=2: a digest of the weights after two epochs of a transformer and of convolutions"
    yield reproducible(place)


@check("ranks", 240, ranks=2)
def reproducible_on_two_ranks(place: Place) -> Steps:
    yield "reproducible=2 on two ranks: the digests, beside those of one rank"
    found = reproducible(place)
    if os.environ["RANK"] == "0":
        path = place.folder / "alone.json"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(FROM_A_LAUNCHER)}
        command = [sys.executable, "-m", "benchmarks.gpu.one", "reproducible_on_one_rank", "--device",
                   str(place.device), "--json", str(path)]  # fmt: skip
        subprocess.run(command, env=environment, check=True, timeout=200)
        alone = json.loads(path.read_text())["figures"]
        yield {"two ranks": found, "one rank": alone}
        assert found == alone, f"{found} on two ranks, {alone} on one"


FROM_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "PACELINE_")


def reproducible(place: Place) -> dict[str, str]:
    """Digests of the weights."""
    figures = {}
    cases = {"transformer": (jobs.GPT, "tensor"), "convolutions": (jobs.CONV, "mean")}
    for name, (job, count) in cases.items():
        run = paceline.start(device=str(place.device), progress="off", tf32=False, deterministic=True, reproducible=2)
        models, _, _ = jobs.ours(run, job, Way("closure", count=count))
        figures[name] = digest(jobs.weights(models))
        run.close()
    torch.use_deterministic_algorithms(False)
    return figures


def digest(tensors: list[torch.Tensor]) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]
