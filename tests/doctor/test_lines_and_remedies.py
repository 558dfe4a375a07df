"""The line that a finding names is the one to change, and the remedy fits the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.doctor.test_doctor import doctor, together
from tests.doctor.test_rules import AT, replica

from paceline.doctor.rules import replica_rules, script_lines
from paceline.doctor.rules.recorded_run import RecordedRun
from paceline.doctor.rules.script_lines import loop_exit

BEGIN = """
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(5)
X, Y = torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
data = TensorDataset(X, Y)
net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
"""
MODEL = BEGIN + "model = DDP(net)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
SAMPLER = "sampler = DistributedSampler(data)\nloader = DataLoader(data, 8, sampler=sampler)\n"
TRAIN = """
for epoch in range(4):
    if "sampler" in globals(): sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
"""
RESTORED = (
    MODEL
    + SAMPLER
    + """
old = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
state = old.state_dict()
if rank == 0:
    optimizer.load_state_dict(state)
"""
    + TRAIN
)
ADAPTERS = (
    """
class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.up = base, nn.Linear(base.in_features, base.out_features)
    def forward(self, x):
        return self.base(x) + self.up(x)
def add_adapters(model):
    for name, child in model.named_children():
        setattr(model, name, Adapter(child) if isinstance(child, nn.Linear) else child)
model = DDP(net)
add_adapters(model.module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + SAMPLER
    + TRAIN
)
DRAWN = """
rng = np.random.default_rng(7)
for step in range(20):
    i = torch.from_numpy(rng.integers(0, 96, 8))
    optimizer.zero_grad()
    cross_entropy(model(X[i]), Y[i]).backward()
    optimizer.step()
"""
SHARDED = (
    """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh, model = init_device_mesh("cpu", (size,)), net
fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + SAMPLER
    + TRAIN
)
TIED = (
    """
model = DDP(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.module[0].weight = nn.Parameter(net[0].weight.detach().clone())
"""
    + SAMPLER
    + TRAIN
)
WORKERS = (
    """
class Noisy(TensorDataset):
    def __getitem__(self, i):
        return X[i] + 0.1 * torch.from_numpy(np.random.rand(6).astype("float32")), Y[i]
def begin(number):
    np.random.seed(number)
data = Noisy(X, Y)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, num_workers=2, worker_init_fn=begin)
"""
    + TRAIN
)
STREAM = (
    """
class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y)
loader = DataLoader(Stream(), 8)
"""
    + TRAIN
)
# name -> (the script, cause, text of the line, text of the line beside it, words of the remedy)
CASES = {
    "optimizer restored on rank 0": (
        RESTORED, "optimizer_differs", "optimizer.load_state_dict(state)", "optimizer =", "load the same optimizer"),
    "rate restored on rank 0": (
        RESTORED.replace("lr=0.1, momentum=0.5", "lr=0.02, momentum=0.9"), "lr_differs",
        "optimizer.load_state_dict(state)", "optimizer =", "Load the same state"),
    "adapters": (BEGIN + ADAPTERS, "unknown_to_ddp", "add_adapters(model.module)", "setattr", "before DDP wraps"),
    "adapters, seeded by rank": (
        BEGIN + ADAPTERS.replace("model = DDP(net)", "model = DDP(net); torch.manual_seed(rank)"), "unknown_to_ddp",
        "add_adapters(model.module)", "setattr", "before DDP wraps"),
    "drawn from one seed": (
        MODEL.replace("manual_seed(0)", "manual_seed(rank)") + DRAWN, "same_examples", "default_rng(7)", "",
        "seed + rank"),
    "not held by FSDP": (BEGIN + SHARDED, "partly_reduced", "fully_shard(model", "optimizer.step()", "ignored_params"),
    "a parameter replaced": (BEGIN + TIED, "no_gradient", "optimizer =", "nn.Parameter(", "before DDP wraps"),
    "of a copy": (
        MODEL.replace("(model.parameters()", "(__import__('copy').deepcopy(net).parameters()") + SAMPLER + TRAIN,
        "no_gradient", "optimizer =", "", "not of a copy"),
    "workers": (MODEL + WORKERS, "same_random_numbers", "np.random.seed(number)", "num_workers=2", "initial_seed"),
    "a stream": (MODEL + STREAM, "same_examples", "DataLoader(Stream()", "", "every world_size-th example"),
    "a sampler of one rank": (
        MODEL + SAMPLER.replace("(data)", "(data, size, 0)") + TRAIN, "same_examples", "loader =", "sampler =",
        "leave rank and num_replicas out"),
    "a split that the rank seeds": (
        MODEL.replace("manual_seed(0)", "manual_seed(rank)")
        + "data, rest = torch.utils.data.random_split(data, [72, 24])\n" + SAMPLER + TRAIN,
        "same_examples", "manual_seed(rank)", "random_split", "same split on all ranks"),
    "parts that overlap": (
        MODEL + "loader = DataLoader(Subset(data, range(rank * 24, rank * 24 + 60)), 8, shuffle=True)" + TRAIN,
        "same_examples", "loader =", "Subset", "indices[rank::world_size]"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(400)
def test_on_two_processes(tmp_path: Path) -> None:
    scripts = {name: text for name, (text, *_) in CASES.items()}
    found = together(tmp_path, scripts, set(), 2, False)
    problems = []
    for name, (text, cause, at, beside, remedy) in CASES.items():
        lines = text.splitlines()
        of_it = [f for f in found[name] if f.cause == cause]
        named = [lines[int(where.rpartition(":")[2]) - 1] if where else "" for f in of_it for where in (f.at, f.beside)]
        if not of_it or at not in named[0] or beside not in named[1] or remedy not in of_it[0].remedy:
            problems.append(f"{name}: {[(f.cause, f.at, f.beside, f.remedy) for f in found[name]]}, {named}")
    assert not problems, "\n".join(problems)


STOPS = (
    MODEL
    + SAMPLER
    + """
def one_epoch(epoch):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
def fit():
    for epoch in range(6):
        one_epoch(epoch)
        if rank == 1 and epoch == 1:
            return
fit()
dist.barrier()
"""
)


@pytest.mark.full
def test_a_rank_that_stops_early(tmp_path: Path) -> None:
    done, document = doctor(tmp_path, STOPS)
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = [f for f in document["findings"] if f["changes_model"]]
    lines = STOPS.splitlines()
    assert (found["cause"], lines[found["line"] - 1].strip()) == ("collectives", "return")
    assert lines[int(found["beside"].rpartition(":")[2]) - 1].strip() == "cross_entropy(model(x), y).backward()"
    assert "in the same iteration" in found["remedy"]


LOOPS = """\
for epoch in range(9):
    for x, y in loader:
        train(x, y)
        if done: break
    if bad: break
evaluate()
while not stop:
    step()
    stop = far
def fit():
    for epoch in range(9):
        one_epoch()
        if bad:
            return
barrier()
def one_epoch():
    for x, y in loader:
        reduce(x)
"""


@pytest.mark.parametrize(
    ("inside", "outside", "line", "apart"),
    [
        ([3], [6], 5, True),  # the outer loop was left
        ([3], [], 5, True),  # the script has ended
        ([3], [5], 4, False),  # the inner one was, or it is the next epoch's
        ([8], [15], 9, True),
        ([18, 12, 20], [15], 14, True),  # by way of a function
        ([18, 12], [18, 12], None, False),
        ([6], [15], None, True),
    ],
)
def test_the_line_that_leaves_a_loop(inside: Any, outside: Any, line: int | None, apart: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(LOOPS)
    found, alone = loop_exit([[str(file), n] for n in inside], [[str(file), n] for n in outside])
    assert (found, alone) == (None if line is None else [str(file), line], apart)


@pytest.mark.parametrize(
    ("text", "shared", "by_rank"),
    [
        ("torch.manual_seed(0)", 1, None),
        ("torch.manual_seed(0 + rank)", None, 1),
        ("torch.manual_seed(rank)\nrng = np.random.default_rng(3)", 2, 1),
        ("rng = np.random.default_rng(3 + rank)\ntorch.manual_seed(1)", 2, None),
        ("def fix(seed):\n    torch.manual_seed(seed)\n    random.seed(seed)\nfix(3)", 4, None),
        ("def fix(seed):\n    torch.manual_seed(seed)\nfix(3 + dist.get_rank())", None, 3),
        ("transformers.set_seed(args.seed)", 1, None),
        ("seed_all(args.seed + local_rank)", None, 1),
        ("sampler = DistributedSampler(data, seed=3)", None, None),
    ],
)
def test_the_line_that_seeds(text: str, shared: int | None, by_rank: int | None, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(text + "\n")
    run = RecordedRun([[{"k": "optimizer", "opt": 0, "at": [str(file), 1]}]])
    lines = [found and found[1] for found in (script_lines.shared_seed(run), script_lines.rank_seed(run))]
    assert lines == [shared, by_rank]


def test_a_state_that_one_rank_loads() -> None:
    restored = {"k": "restored", "opt": 0, "at": ["train.py", 3]}
    ours = replica(settings=[{"momentum": "0.5"}])
    theirs = replica(after=2.0, settings=[{"momentum": "0.9"}])
    found = replica_rules.findings(RecordedRun([[*ours[:2], restored, *ours[2:]], theirs]))
    assert [(f.cause, f.at, f.beside) for f in found] == [("optimizer_differs", "train.py:3", "train.py:7")]
    both = [[*events[:2], restored, *events[2:]] for events in (ours, theirs)]
    found = replica_rules.findings(RecordedRun(both))
    assert [(f.cause, f.at) for f in found] == [("optimizer_differs", f"train.py:{AT[1]}")]


def test_gradients_that_fsdp_does_not_hold() -> None:
    sharded = {"k": "fsdp", "ranks": [0, 1], "at": ["train.py", 4]}
    ranks = [replica(), replica(after=2.0, grads=2.0)]
    events = [[sharded, *(e for e in own if e["k"] != "coll")] for own in ranks]
    (found,) = replica_rules.findings(RecordedRun(events))
    assert (found.cause, found.at, found.beside) == ("partly_reduced", "train.py:4", "train.py:7")
    assert "ignored_params" in found.remedy
    assert found.as_json()["remedy"] == found.remedy != found.about.remedy
