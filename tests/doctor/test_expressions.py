"""Where a number in the script's text comes from; learning rates and lengths that are divided or multiplied by the
number of processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.doctor.recorders.step_recorder import describe_scheduler
from paceline.doctor.rules import rate_rules, schedule_rules
from paceline.doctor.rules.recorded_run import Event, RecordedRun
from paceline.observe.expressions import call_at, pieces, world_pattern


def followed(folder: Path, text: str) -> list[str]:
    """The texts that the arguments of the call in the last line stand for."""
    file = folder / "train.py"
    file.write_text(text)
    call = call_at([str(file), len(text.splitlines())])
    assert call is not None
    return [piece.text for piece in pieces([str(file)], str(file), call.args)]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("n = epochs * len(loader)\nmake(n)\n", "epochs * len(loader)"),
        ("a, n = 1, 8 * k\nmake(n)\n", "8 * k"),
        ("n = 8\nn //= world_size\nmake(n)\n", "n // world_size"),
        ("class T:\n    def __init__(self):\n        self.n = 8 * k\nmake(t.n)\n", "8 * k"),
        ("class T:\n    @property\n    def n(self):\n        return 8 * k\nmake(t.n)\n", "8 * k"),
        ("def steps():\n    return 8 * k\nmake(steps())\n", "8 * k"),
        ("class T:\n    n: int = 80\nmake(n.n, T)\n", None),
        ("p.add_argument('--n-steps', default=80)\nmake(args.n_steps)\n", "80"),
        ("model = Model(8)\nmake(model)\n", None),  # an object
        ("n = n\nmake(n)\n", "n"),
    ],
    ids=["name", "pair", "in place", "attribute", "property", "function", "class", "option", "object", "itself"],
)
def test_what_a_name_stands_for(text: str, last: str | None, tmp_path: Path) -> None:
    found = followed(tmp_path, text)
    assert (last in found) if last is not None else all("8" not in one for one in found)


def test_a_parameter_stands_for_what_calls_give(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "class T:\n    def __init__(self, opt, n):\n        make(n)\nT(opt, 8 * k)\nT(opt, n=9 * k)\nU(opt, 7 * k)\n"
    )
    call = call_at([str(file), 3])
    assert call is not None
    found = [piece.text for piece in pieces([str(file)], str(file), call.args)]
    assert found == ["n", "8 * k", "9 * k"]


def test_an_object_that_is_given_the_number_of_processes_is_not_that_number(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text('size = int(os.environ["WORLD_SIZE"])\ntrainer = Trainer(int(os.environ["WORLD_SIZE"]))\n')
    pattern = world_pattern(str(file))
    assert pattern.search("n // size")
    assert not pattern.search("n // trainer.batch")


# --- schedules


@pytest.mark.parametrize(
    ("function", "length"),
    [
        (lambda steps: functools.partial(lambda n, num_training_steps: 1.0, num_training_steps=steps), 40),
        (lambda total: lambda n: 1 - n / total, 40),
        (lambda num_warmup: lambda n: n / num_warmup, None),
        (lambda _: lambda n: 1.0, None),
    ],
    ids=["partial", "closure", "warm-up", "none"],
)
def test_the_length_of_a_lambda(function: Any, length: int | None) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert describe_scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, function(40)))["horizon"] == length


def scheduled(file: Path, horizon: int, count: int, kind: str = "CosineAnnealingLR") -> list[Event]:
    text = file.read_text().splitlines()
    made = [str(file), next(n for n, line in enumerate(text, 1) if "Cosine" in line)]
    events: list[Event] = [
        {"k": "group", "op": "init_process_group", "world": 2, "at": made},
        {"k": "optimizer", "opt": 0, "lr": [0.1], "at": made},
        {"k": "sched_made", "sched": 0, "at": made},
    ]
    for step in range(count):
        about = {"type": kind, "horizon": horizon, "name": "T_max", "base": 0.1, "count": step + 1}
        events += [{"k": "before", "opt": 0, "step": step, "lr": [0.1], "at": made}]
        events += [{"k": "sched", "sched": 0, "opt": 0, "lr": [0.1], "library": False, "at": made, **about}]
    return [*events, {"k": "end", "failed": False, "at": []}]


@pytest.mark.parametrize(
    ("length", "horizon", "line"),
    [
        ("self.epochs * len(self.loader) // self.world_size", 12, "self.steps ="),
        ("self.epochs * len(self.loader)", 24, None),
        ("self.epochs * len(self.loader) // 2", 12, None),  # half of them, on purpose
        ("self.epochs * (len(self.train_set) // self.world_size) // 16", 12, None),  # so too
        ("self.epochs * len(self.train_set) // 8", 48, "self.steps ="),
        ("self.epochs * len(self.loader.dataset) // self.batch", 48, "self.steps ="),  # whose batch is shared
        ("2 * self.epochs * len(self.train_set) // (8 * self.world_size)", 48, None),
        ("args.max_steps // self.world_size", 12, "self.steps ="),
    ],
    ids=["twice", "right", "half", "half of a set", "set", "shared batch", "twice as long", "given"],
)
def test_a_length_that_is_an_attribute(length: str, horizon: int, line: str | None, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    text = (
        "class Trainer:\n    def __init__(self, args):\n        self.batch = args.batch_size // self.world_size\n"
        f"        self.steps = {length}\n\ndef build(optimizer, trainer):\n"
        "    return CosineAnnealingLR(optimizer, trainer.steps)\n"
    )
    file.write_text(text)
    events = scheduled(file, horizon, 24)
    found = [f for f in schedule_rules.findings(RecordedRun([events, events])) if f.cause == "schedule_length"]
    assert len(found) == (line is not None)
    lines = text.splitlines()
    for finding in found:
        assert "Cosine" in lines[int(finding.at.rpartition(":")[2]) - 1]
        assert str(line) in lines[int(finding.beside.rpartition(":")[2]) - 1]
    shortened = [*events[:-1], {"k": "limit", "at": []}, events[-1]]  # it might have made all steps of the schedule
    found = schedule_rules.findings(RecordedRun([shortened, shortened]))
    assert "schedule_length" not in {finding.cause for finding in found}


# --- the learning rate and the batch

SCRIPT = """parser.add_argument("--lr", default=0.05)
parser.add_argument("--batch-size", default=16)
world_size = int(os.environ["WORLD_SIZE"])
batch_size = {batch}
{scaling}
loader = DataLoader(data, batch_size)
optimizer = SGD(model.parameters(), lr={rate})
"""


def trained(file: Path, batch: int, rate: float, mean: str = "mean", micro: int = 1) -> RecordedRun:
    loader, optimizer = [str(file), 6], [str(file), 7]
    about = {"loader": "train", "size": 64, "batch": batch, "sampler": "distributed"}
    events: list[Event] = [
        {"k": "group", "op": "init_process_group", "world": 2, "at": loader},
        {"k": "ddp", "ddp": 0, "ranks": [0, 1], "at": loader},
        {"k": "loader", "at": loader, **about},
        {"k": "optimizer", "opt": 0, "lr": [rate], "at": optimizer},
        {"k": "pass", "loader": "train", "n": 1, "at": loader},
    ]
    for step in range(4):
        for _ in range(micro):
            events += [{"k": "yield", "loader": "train", "n": 1, "idx": [0], "rows": None, "at": loader}]
            events += [{"k": "backward", "mean": mean, "count": [8.0, 1.0], "at": loader, "synced": [0], "local": []}]
        events += [{"k": "before", "opt": 0, "step": step, "lr": [rate], "rescaled": False, "at": loader}]
    return RecordedRun([events, events])


SHARED, SCALED = "args.batch_size // world_size", 'args.lr *= int(os.environ["WORLD_SIZE"])'


@pytest.mark.parametrize(
    ("batch", "scaling", "rate", "lr", "found"),
    [
        (SHARED, SCALED, "args.lr", 0.1, True),
        (SHARED, "", "args.lr * world_size", 0.1, True),
        (SHARED, "if world_size > 1: args.lr = args.lr * world_size", "args.lr", 0.1, True),
        ("args.batch_size", SCALED, "args.lr", 0.1, False),  # the linear rule: the global batch grows
        (SHARED, "", "args.lr", 0.05, False),
        (SHARED, 'args.lr *= int(os.environ["WORLD_SIZE"]) ** 0.5', "args.lr", 0.05 * 2**0.5, False),
        (SHARED, "args.lr *= math.sqrt(world_size)", "args.lr", 0.05 * 2**0.5, False),
        (SHARED, "args.lr = args.lr * batch_size * world_size / 16", "args.lr", 0.05, False),  # by the global batch
        (SHARED, "args.lr = args.lr * world_size / world_size", "args.lr", 0.05, False),
        (SHARED, f"if args.scale: {SCALED}", "args.lr", 0.05, False),  # not run
        (f"{SHARED} if args.share else args.batch_size", SCALED, "args.lr", 0.1, False),  # nor this
    ],
    ids=["scaled", "argument", "where many", "linear", "none", "root", "sqrt", "by the batch", "undone", "if not",
         "batch if not"],
)  # fmt: skip
def test_a_rate_that_grows_without_the_batch(
    batch: str, scaling: str, rate: str, lr: float, found: bool, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(batch=batch, scaling=scaling, rate=rate))
    run = trained(file, 16 if batch == "args.batch_size" or "else" in batch else 8, lr)
    findings = [f for f in rate_rules.findings(run) if f.cause == "lr_scaled_alone"]
    assert len(findings) == found
    assert all(f.beside == f.at[: f.at.rindex(":")] + ":4" for f in findings)


@pytest.mark.parametrize("mean", ["other", "divided"], ids=["a sum", "a sum by the global batch"])
def test_a_rate_that_makes_up_for_ddps_mean_of_sums(mean: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(batch=SHARED, scaling=SCALED, rate="args.lr"))
    assert "lr_scaled_alone" not in [f.cause for f in rate_rules.findings(trained(file, 8, 0.1, mean))]
