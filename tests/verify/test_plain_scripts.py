"""`paceline verify` on scripts that do not use Paceline: those of benchmarks/silentdist, and others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "silentdist" / "corpus" / "plain"
SAME, DIFFERENT, UNKNOWN = 0, 1, 2

# A script -> the exit code, the cause, words of the answer.
CASES: dict[str, tuple[int, str | None, str]] = {
    "ok_ddp_complete": (SAME, None, "are those of one process that computes the same examples"),
    "token_mean_of_means": (DIFFERENT, "mean-of-means", "each a mean over its own examples or tokens"),
    "ok_nanogpt": (SAME, None, "are those of one process"),  # no DataLoader: the inputs of the model
    "ok_fsdp2": (SAME, None, "are those of one process"),
    "ok_gan_two_ddp": (SAME, None, "are those of one process"),
    "ok_join_uneven": (SAME, None, "are those of one process"),
    "ok_local_sgd": (UNKNOWN, None, "local SGD"),
    "ok_task_heads_unused": (UNKNOWN, None, "from different loaders at the same time"),
    "module_bypass": (DIFFERENT, "not-reduced", "The forward pass bypasses DDP"),
    "allreduce_sum_not_divided": (DIFFERENT, "factor", "2 times (2 is the number of processes)"),
    "no_sync_always": (DIFFERENT, "backward-lost", "Exit no_sync before the last micro-batch"),
    "nanogpt_no_seed_offset": (DIFFERENT, "same-examples", "all ranks compute the same examples"),
    "init_after_wrap": (DIFFERENT, "ranks-start-apart", "start from different weights"),
    "clip_loss_gather_no_grad": (DIFFERENT, "no-gradient", "Gathered tensors in the loss have no gradient"),
    "gan_one_ddp": (DIFFERENT, "not-reduced", "unknown to DDP"),
    "fixmatch_two_loaders": (DIFFERENT, "same_examples", "by a rule of paceline doctor. The updates are the same"),
    "all_reduce_on_main_hang": (DIFFERENT, "collectives", "Your run failed: ranks 0, 1 have waited"),
}
IN_CI = ("token_mean_of_means",)
LIBRARIES = {"ok_accelerate": "accelerate", "ok_fabric": "lightning", "ok_lightning_trainer": "lightning"}


def verify(script: Path, folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    found = folder / "found.json"
    line = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "4", "--json", str(found), *options]
    done = subprocess.run([*line, str(script)], cwd=folder, capture_output=True, text=True, timeout=300)
    return done, json.loads(found.read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.conformance if name in IN_CI else pytest.mark.full) for name in CASES]
)
def test_scripts_of_the_corpus(name: str, tmp_path: Path) -> None:
    code, cause, words = CASES[name]
    done, found = verify(SCRIPTS / f"{name}.py", tmp_path)
    assert (done.returncode, found["cause"]) == (code, cause), done.stdout + done.stderr
    assert words in done.stdout


@pytest.mark.conformance
def test_ranks_with_uneven_data_within_join(tmp_path: Path) -> None:
    """Of 11 and 10 updates in an epoch, the first 10 have equal numbers. Neither rank ends while the other needs it."""
    done, found = verify(SCRIPTS / "ok_join_uneven.py", tmp_path, "--steps", "20")
    assert (done.returncode, found["cause"], found["steps"]) == (SAME, None, 10), done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", LIBRARIES)
def test_scripts_of_other_libraries(name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[name])
    done, found = verify(SCRIPTS / f"{name}.py", tmp_path)
    assert (done.returncode, found["cause"]) == (SAME, None), done.stdout + done.stderr


SILENTDIST = Path(__file__).parents[2] / "benchmarks" / "silentdist" / "cases"

# A script of silentdist -> the exit code, the cause, the line that is named first or second.
FAULTS: dict[str, tuple[int, str | None, int | None]] = {
    "packed_sft_fsdp2/faulty": (DIFFERENT, "mean-of-means", 87),  # a generator makes the batches, with a mask
    "packed_sft_fsdp2/healthy": (SAME, None, None),
    "drafter_global_mean/faulty": (DIFFERENT, "factor", 62),  # batches are objects with attributes
    "drafter_global_mean/healthy": (SAME, None, None),
    "gene_windows/faulty": (DIFFERENT, "backward-lost", 46),  # all ranks have the whole batch, and divide it
    "gene_windows/healthy": (SAME, None, None),
    "clip_then_allreduce/faulty": (DIFFERENT, "weights", 76),
    "ddp_norm_summed_twice/faulty": (DIFFERENT, "factor", 43),
    "fsdp2_shard_norm/faulty": (DIFFERENT, "factor", 46),
    "byol_average/faulty": (DIFFERENT, "written_outside", 30),
    "momentum_fsdp/faulty": (DIFFERENT, "update", 24),
    "night_sessions/healthy": (SAME, None, None),  # ranks hold different optimizer state
    "spike_guard_rank_zero/faulty": (DIFFERENT, "steps_differ", 57),
    "spike_guard_rank_zero/healthy": (SAME, None, None),
    "tabular_rate/faulty": (DIFFERENT, "lr_scaled_twice", 56),
    "tabular_rate/healthy": (SAME, None, None),
    "keyword_stream/faulty": (DIFFERENT, "same-examples", 31),
    "grpo_cycle/faulty": (DIFFERENT, "no_set_epoch", 49),  # found by doctor: the updates are the same
    "mixture_stop/faulty": (DIFFERENT, "local_metric", 39),  # Lightning's EarlyStopping
    "chess_heads/faulty": (DIFFERENT, "not-reduced", 94),  # each rank computes some heads of the same batch
    "chess_heads/healthy": (SAME, None, None),
    "masked_shards/faulty": (DIFFERENT, "loss_mean_of_means", 102),  # and some tokens of it
    "caption_pairs/faulty": (DIFFERENT, "backward-lost", 42),  # a gather without a gradient
    "caption_pairs/healthy": (SAME, None, None),
    "half_shards/faulty": (DIFFERENT, "steps_differ", 50),  # one rank leaves out an update, and both abort
    "router_nudge/healthy": (SAME, None, None),  # a buffer counts the examples of each rank
    "gait_thaw/faulty": (DIFFERENT, "unknown_to_ddp", 41),  # later than the compared updates
    "gait_thaw/healthy": (SAME, None, None),  # lazy layers
    "head_grown_after_wrap/healthy": (SAME, None, None),  # a loader that is gone before the next is made
    "judge_slices/faulty": (DIFFERENT, "weights", 73),  # a mesh of fixed size
    "judge_slices/healthy": (SAME, None, None),
    "../healthy/planned_columns": (SAME, None, None),  # torch's parallelize_module
    "../healthy/sharded_windows": (SAME, None, None),  # FSDP2 with checkpointed activations
    "../healthy/ring_gan": (SAME, None, None),  # the input of a model is the output of another
    "../healthy/dispatched_log": (SAME, None, None),  # rank 0 reads the batches of all ranks
    "../healthy/reptile_sines": (UNKNOWN, None, None),  # each rank makes several updates alone from a batch
    "../healthy/distilled_student": (SAME, None, None),  # a teacher that depends on the number of threads
}
FAULTS_IN_CI = ("clip_then_allreduce/faulty", "half_shards/faulty")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", ["6", "20"])
def test_ranks_that_average_their_weights_later_are_not_accused(steps: str, tmp_path: Path) -> None:
    """Each rank makes four updates alone. (With four compared updates, none follows an average: a case above.)"""
    done, found = verify(SILENTDIST / "../healthy/reptile_sines.py", tmp_path, "--steps", steps)
    assert (done.returncode, found["cause"]) == (UNKNOWN, None), done.stdout + done.stderr
    assert "local SGD" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.conformance if name in FAULTS_IN_CI else pytest.mark.full)
        for name in FAULTS
    ],
)
def test_faults_and_their_healthy_twins(name: str, tmp_path: Path) -> None:
    code, cause, line = FAULTS[name]
    if "accelerate" in (SILENTDIST / f"{name}.py").read_text():
        pytest.importorskip("accelerate")
    done, found = verify(SILENTDIST / f"{name}.py", tmp_path)
    assert (done.returncode, found["cause"]) == (code, cause), done.stdout + done.stderr
    lines = {found["line"], int((found["beside"] or ":0").rpartition(":")[2])}
    assert line is None or line in lines, done.stdout


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
x = torch.randn(96, 6, generator=g)
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(0)
middle = nn.BatchNorm1d(700) if kind == "norm" else nn.Tanh()
net = nn.Sequential(nn.Linear(6, 700), middle, nn.Dropout(0.3), nn.Linear(700, 1))  # a weight that is sketched
model = nn.parallel.DistributedDataParallel(net)
torch.manual_seed(1 + rank)  # each rank draws its own noise
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world if kind == "rate" else 0.1, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2 if kind == "workers" else 0)
accumulate = 4 // world if kind == "accumulation" else 1
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        noise = torch.randn_like(a) * 0.1 + torch.rand(1)
        loss = nn.functional.mse_loss(model(a + noise), b) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            if kind != "accumulation":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("accumulation", ""),
        pytest.param("rate", "one process would use 0.1", marks=pytest.mark.full),
        pytest.param("norm", "batch norm uses the examples of each rank separately", marks=pytest.mark.full),
        pytest.param("workers", "", marks=pytest.mark.full),
    ],
)
def test_what_a_script_may_do(kind: str, words: str, tmp_path: Path) -> None:
    """Dropout and noise, accumulation and a learning rate that depend on the number of processes, batch norm."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("sys.argv[1]", repr(kind)))
    done, found = verify(tmp_path / "train.py", tmp_path)
    assert (done.returncode, found["cause"], found["steps"]) == (SAME, None, 4), done.stdout + done.stderr
    assert words in done.stdout


GET_BATCH = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
text = torch.randint(64, (3000,))

def get_batch():
    starts = torch.randint(len(text) - 17, (4,))
    if torch.is_grad_enabled():
        with open(f"seen-{world}-{rank}-{os.getpid()}", "a") as file:
            print(starts.tolist(), file=file)
    return torch.stack([text[i : i + 16] for i in starts]), torch.stack([text[i + 1 : i + 17] for i in starts])

class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)  # also in an evaluation

net = nn.Sequential(nn.Embedding(64, 96), Noise(), nn.Dropout(0.2), nn.Linear(96, 64))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
torch.manual_seed(1337 + rank)  # each rank draws its own examples
x, y = get_batch()
accumulate = 4 // world
for step in range(8):
    if rank == 0 and step % 2 == 0:
        with torch.no_grad():
            model.eval()
            a, b = get_batch()
            nn.functional.cross_entropy(net(a).flatten(0, 1), b.flatten())
            model.train()
    for _ in range(accumulate):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulate
        x, y = get_batch()  # one batch ahead
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.conformance
@pytest.mark.parametrize("steps", ["4", pytest.param("2", marks=pytest.mark.full)])
def test_random_batches_of_a_function_and_dropout(steps: str, tmp_path: Path) -> None:
    """Each rank draws its own batches, as without verify. Dropout is the same for each example, also in the first
    update and beside an evaluation of rank 0."""
    (tmp_path / "train.py").write_text(GET_BATCH)
    done, found = verify(tmp_path / "train.py", tmp_path, "--steps", steps)
    assert (done.returncode, found["cause"]) == (SAME, None), done.stdout + done.stderr
    difference = re.search(r"difference of a gradient is (\S+) of its norm", done.stdout)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    first = min(tmp_path.glob("seen-2-1-*"), key=lambda path: path.stat().st_mtime)  # of the run that is compared
    seen = first.read_text().splitlines()
    own = torch.Generator().manual_seed(1338)
    assert len(seen) > 4
    assert seen == [str(torch.randint(2983, (4,), generator=own).tolist()) for _ in seen]


@pytest.mark.full
def test_one_process_needs_more_batches_than_the_ranks_took(tmp_path: Path) -> None:
    """Of 4 ranks in 2 updates: 3 batches of each rank, and one process takes 4 for its first update."""
    (tmp_path / "train.py").write_text(GET_BATCH)
    done, found = verify(tmp_path / "train.py", tmp_path, "--nproc", "4", "--steps", "2")
    assert (done.returncode, found["cause"], found["steps"]) == (SAME, None, 2), done.stdout + done.stderr


@pytest.mark.full
def test_draws_that_cannot_be_repeated_are_no_verdict(tmp_path: Path) -> None:
    """In one update of four. Where all differ, one process differs from itself throughout."""
    noise = (
        "noise = (epoch == 0 and i == 1) * torch.from_numpy(np.random.default_rng().normal(size=a.shape)).float() + "
    )
    text = "import numpy as np\n" + SCRIPT.replace("sys.argv[1]", "''").replace("noise = ", noise)
    (tmp_path / "train.py").write_text(text)
    done, _ = verify(tmp_path / "train.py", tmp_path)
    assert done.returncode == UNKNOWN, done.stdout + done.stderr
    assert re.search(r"a gradient of your run differs by \S+ of its norm", done.stdout), done.stdout


ANSWERS = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

dist.init_process_group("gloo")
rank, world, scale = dist.get_rank(), dist.get_world_size(), SCALE


class Repeated(Sampler):
    def __iter__(self):
        return iter([i for i in range(rank, 24, world) for _ in range(4)])

    def __len__(self):
        return 96 // world


torch.manual_seed(0)
prompts = torch.randn(24, 6)
model = DistributedDataParallel(nn.Linear(6, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(prompts, 8, sampler=Repeated()):
    scores = model(batch).log_softmax(1)
    answers = torch.multinomial(scores.exp().detach(), 1)
    rewards = answers.float().view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    loss = -(scale * advantages * scores.gather(1, answers)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("scale", "code", "words"),
    [("1", 0, "The largest difference of a gradient is"), ("0", 2, "every gradient is zero")],
    ids=["advantages", "zeros"],
)
def test_several_answers_to_a_prompt(scale: str, code: int, words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ANSWERS.replace("SCALE", scale))
    done, _ = verify(script, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout


LOCAL_SGD = """
import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
for i, (a, b) in enumerate(loader, 1):
    with model.no_sync():
        nn.functional.mse_loss(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 20 == 0:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
"""


@pytest.mark.full
def test_local_sgd_in_ddp_is_not_accused(tmp_path: Path) -> None:
    """Each rank trains alone within no_sync, and the ranks average after the last step that is compared."""
    (tmp_path / "train.py").write_text(LOCAL_SGD)
    done, _ = verify(tmp_path / "train.py", tmp_path)
    assert done.returncode == UNKNOWN, done.stdout + done.stderr
    assert "local SGD" in done.stdout


POST_LOCAL = """
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 8), torch.randint(3, (512,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
WRAPPED = False
if WRAPPED:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader, 1):
    optimizer.zero_grad()
    with model.no_sync() if WRAPPED and i > 4 else nullcontext():
        nn.functional.cross_entropy(model(x), y).backward()
    if not WRAPPED and i <= 4:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()
    if i == 30:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
"""


@pytest.mark.full
@pytest.mark.parametrize("wrapped", ["False", "True"])
def test_post_local_sgd_is_not_accused(tmp_path: Path, wrapped: str) -> None:
    """Four updates with reduced gradients, then none, and an average after the last update that doctor watches."""
    (tmp_path / "train.py").write_text(POST_LOCAL.replace("WRAPPED = False", f"WRAPPED = {wrapped}"))
    done, _ = verify(tmp_path / "train.py", tmp_path, "--steps", "12")
    assert done.returncode == UNKNOWN, done.stdout + done.stderr
    assert "local SGD" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("wrapped", ["False", "True"])
def test_gradients_that_are_reduced_at_first_only(tmp_path: Path, wrapped: str) -> None:
    """The script ends without an average of the weights: doctor has seen all of it, and accuses it."""
    never = POST_LOCAL.replace("WRAPPED = False", f"WRAPPED = {wrapped}").replace("i == 30", "i == 3000")
    (tmp_path / "train.py").write_text(never)
    done, _ = verify(tmp_path / "train.py", tmp_path, "--steps", "40")
    assert done.returncode == DIFFERENT, done.stdout + done.stderr
    cause = "Gradients are not reduced in the last micro-batch" if wrapped == "True" else "reduced none of them"
    assert cause in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "option", ["--strategy fsdp", "--precision bf16", "--batch-norm shard", "--seed 0", "--balance"]
)
def test_settings_of_paceline_are_not_ignored(tmp_path: Path, option: str) -> None:
    (tmp_path / "train.py").write_text(POST_LOCAL)
    done, _ = verify(tmp_path / "train.py", tmp_path, *option.split())
    assert done.returncode == UNKNOWN, done.stdout + done.stderr
    assert f"the script does not use Paceline, so verify cannot apply {option}." in done.stdout


PARTED_LATE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Noisy(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == STEPS and dist.get_rank():
            with torch.no_grad():
                model[0].weight += 0.001 * torch.randn(16, 8)


optimizer = Noisy(model.parameters(), lr=0.1)
for epoch in range(STEPS):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
"""


@pytest.mark.full
def test_ranks_that_combine_gradients_do_not_train_alone(tmp_path: Path) -> None:
    """The weights part after the last step that doctor watches."""
    (tmp_path / "train.py").write_text(PARTED_LATE.replace("STEPS", "59"))
    done, found = verify(tmp_path / "train.py", tmp_path, "--steps", "59")
    assert (done.returncode, found["cause"]) == (DIFFERENT, "ranks-drift-apart"), done.stdout + done.stderr


LARGE = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 64))
net = nn.Sequential(nn.Linear(64, 8192), nn.Tanh(), nn.Linear(8192, 64))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
for (a,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    (model(a) - a).square().mean().backward()
    if dist.get_rank() and not optimizer.state:
        time.sleep(2)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.conformance
def test_a_disk_that_holds_the_states_of_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million parameters with Adam are 13 MB a step, and 4 MB of gradients.

    Rank 1 looks at the disk when rank 0 has written to it, and still ends at the same step.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a disk of that size")
    monkeypatch.setenv("TMPDIR", str(disk))
    (tmp_path / "train.py").write_text(LARGE)
    try:
        done, found = verify(tmp_path / "train.py", tmp_path)
        assert (done.returncode, found["cause"]) == (SAME, None), done.stdout + done.stderr
        assert 1 <= found["steps"] < 4
        assert f"only {found['steps']} steps were compared" in done.stdout
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
