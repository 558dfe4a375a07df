"""`paceline verify` on scripts that divide a model between the ranks by hand: tensor and expert parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.test_plain_scripts import DIFFERENT, SAME, UNKNOWN, verify

SCRIPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn

class Enter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    backward = staticmethod(lambda ctx, grad: grad)

def part(whole, dim):
    return nn.Parameter(whole.detach().chunk(size, dim)[rank].clone())

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        qkv, out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.qkv = nn.Parameter(torch.cat([w.chunk(size)[rank] for w in qkv.weight.detach().chunk(3)]))
        self.bias = nn.Parameter(torch.cat([b.chunk(size)[rank] for b in qkv.bias.detach().chunk(3)]))
        self.out, self.out_bias = part(out.weight, 1), nn.Parameter(out.bias.detach().clone())

    def forward(self, x):
        q, k, v = F.linear(Enter.apply(x), self.qkv, self.bias).view(*x.shape[:2], 3, -1, 4).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return Leave.apply(F.linear(x, self.out)) + self.out_bias

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = nn.Linear(16, 40), nn.Linear(40, 16)
        self.up, self.up_bias = part(up.weight, 0), part(up.bias, 0)
        self.down, self.down_bias = part(down.weight, 1), nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        x = F.gelu(F.linear(Enter.apply(x), self.up, self.up_bias))
        return Leave.apply(F.linear(x, self.down)) + self.down_bias

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x = torch.randn(96, 6, 16)
data = torch.utils.data.TensorDataset(x, x.sum((1, 2), keepdim=True).sign()[:, :, 0])
model = nn.Sequential(nn.Linear(16, 16), FeedForward(), nn.LayerNorm(16), nn.Flatten(), nn.Linear(96, 1))
loader = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 5.0)
    optimizer.step()
dist.destroy_process_group()
"""
EXPERTS = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather, reduce_scatter

class Experts(nn.Module):
    \"\"\"Each rank holds some of the experts, and computes them for the tokens of all ranks.\"\"\"
    def __init__(self):
        super().__init__()
        whole = torch.randn(4, 12, 12) / 4
        self.weight = nn.Parameter(whole.chunk(size)[rank].clone())
        self.router = nn.Linear(12, 4)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        x, gates = (torch.cat(all_gather(t.contiguous())) for t in (x, gates))
        own = gates.chunk(size, 1)[rank]
        y = torch.einsum("td,edh,te->th", x, self.weight, own)
        return reduce_scatter(torch.empty(len(y) // size, 12), [t.contiguous() for t in y.chunk(size)])

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x = torch.randn(128, 12)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sign())
model = nn.Sequential(nn.Linear(12, 12), Experts(), nn.Tanh(), nn.Linear(12, 1))
sampler = torch.utils.data.DistributedSampler(data, size, rank, seed=1)
loader = torch.utils.data.DataLoader(data, 8, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if name == "1.weight":
            p.grad /= size
        else:
            dist.all_reduce(p.grad)
            p.grad /= size
    optimizer.step()
dist.destroy_process_group()
"""
UNDIVIDED = ("            p.grad /= size\n        else", "            pass\n        else")
ATTENTION = (
    "model = nn.Sequential(nn.Linear(16, 16), FeedForward()",
    "model = nn.Sequential(nn.Linear(16, 16), Attention()",
)
ENTER = ("        dist.all_reduce(grad)\n", "")
BIAS = ("Leave.apply(F.linear(x, self.down)) + self.down_bias", "Leave.apply(F.linear(x, self.down, self.down_bias))")
HALF = ("backward = staticmethod(lambda ctx, grad: grad)", "backward = staticmethod(lambda ctx, grad: grad / size)")
OWN_SEED = ("model = nn.Seq", "torch.manual_seed(7 + rank)\nmodel = nn.Seq")
SENT = (
    "loader =",
    "for p in model.parameters():\n    if p.shape not in PARTS:\n        dist.broadcast(p.data, 0)\nloader =",
)
PARTS = ("x = torch.randn(96", "PARTS = {(40 // size, 16), (40 // size,), (16, 40 // size)}\nx = torch.randn(96")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("base", "changes", "code", "cause", "words"),
    [
        pytest.param(SCRIPT, [], SAME, None, "are those of one process", marks=pytest.mark.conformance, id="healthy"),
        pytest.param(
            SCRIPT,
            [ENTER],
            DIFFERENT,
            "not-reduced",
            "a backward between the ranks lacks an all-reduce",
            marks=pytest.mark.full,
            id="no reduce",
        ),
        pytest.param(
            SCRIPT,
            [BIAS],
            DIFFERENT,
            "forward-differs",
            "The loss differs too",
            marks=pytest.mark.full,
            id="a bias added by each rank",
        ),
        pytest.param(
            SCRIPT,
            [HALF],
            DIFFERENT,
            "factor",
            "1/2 times (2 is the number of processes)",
            marks=pytest.mark.full,
            id="gradients of the parts halved",
        ),
        pytest.param(EXPERTS, [], SAME, None, "are those of one process", marks=pytest.mark.full, id="experts"),
        pytest.param(
            EXPERTS,
            [UNDIVIDED],
            DIFFERENT,
            "factor",
            "2 times (2 is the number of processes)",
            marks=pytest.mark.full,
            id="experts' gradients not divided",
        ),
        # each rank draws its own part, so only the loss shows that the parts join
        pytest.param(
            SCRIPT,
            [OWN_SEED, PARTS, SENT],
            SAME,
            None,
            "are those of one process",
            marks=pytest.mark.full,
            id="own seeds",
        ),
        # a rank's part is made of three slices of the whole: verify does not know which
        pytest.param(
            SCRIPT,
            [ATTENTION],
            UNKNOWN,
            None,
            "does not know how the parts make a model",
            marks=pytest.mark.full,
            id="three slices",
        ),
    ],
)
def test_a_model_that_the_ranks_hold_parts_of(
    base: str, changes: list[tuple[str, str]], code: int, cause: str | None, words: str, tmp_path: Path
) -> None:
    text = base
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "script.py"
    script.write_text(text)
    done, found = verify(script, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout
    assert found["cause"] == cause
