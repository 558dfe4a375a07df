"""`paceline verify` on gathers, called by position and by name, of the loss for a log and of features for a loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SCRIPT = dedent(
    """\
    import sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    features = "features" in sys.argv
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 5), torch.randn(48, 4))
    model = DistributedDataParallel(torch.nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data, 4, sampler=DistributedSampler(data)):
        out = model(x)
        if features:
            parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
            dist.all_gather(tensor=out, tensor_list=parts)
            logits = out @ torch.cat(parts).T
            own = dist.get_rank() * len(out) + torch.arange(len(out))
            loss = torch.nn.functional.cross_entropy(logits, own)
        else:
            loss = (out - y).square().mean()
            every = [torch.empty(1) for _ in range(dist.get_world_size())]
            dist.all_gather(every, loss.view(1), dist.group.WORLD)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        pytest.param("loss", 0, "the same. 4 updates", marks=pytest.mark.full),
        pytest.param("features", 1, "the gathered tensors have none", marks=pytest.mark.conformance),
    ],
)
def test_a_gather(kind: str, code: int, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "4", str(script), kind]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout
