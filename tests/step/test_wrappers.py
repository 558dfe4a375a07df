"""Models that are wrapped already, and files that were written of wrapped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12.0).view(-1, 1)

COMPILED = """
import torch, paceline
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12.0).view(-1, 1)

def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

def trained(given, use):
    run = paceline.start(device="cpu", progress="off")
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    model, optimizer = run.prepare(given, optimizer)
    use = given if use == "the script's own" else model
    for epoch in run.epochs(2):
        for x, y in loader if epoch else (loader := run.loader(TensorDataset(X, Y), global_batch=4)):
            run.backward(F.mse_loss(use(x), y))
            run.step(optimizer)
    for batch in loader:
        run.forward_backward(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), use, batch)
        run.step(optimizer)
    run.export("model.safetensors", use)
    names = list(model.state_dict())
    run.close()
    return load_file("model.safetensors"), names

expected, names = trained(made(), "what prepare returned")
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph
for use in ("the script's own", "what prepare returned"):
    graphs.clear()
    torch._dynamo.reset()
    found, own = trained(torch.compile(made(), backend=backend), use)
    assert own == names, own
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected), use
    assert graphs, use
"""


@pytest.mark.conformance
def test_a_model_in_the_wrapper_of_torch_compile_is_trained_compiled_and_has_its_own_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COMPILED)
    run_script(script)


class DistributedDataParallel(nn.Module):
    """A script's own class, of the name that torch's has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def wrapped_by(name: str, module: str, base: type = nn.Module) -> Any:
    """An object of a class of another library, which need not be installed."""
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("thing", "inside"),
    [
        (nn.DataParallel(nn.Linear(2, 2)), "module"),
        (wrapped_by("DistributedDataParallel", "torch.nn.parallel.distributed", nn.Module)(), "module"),
        (wrapped_by("_FabricModule", "lightning.fabric.wrappers", nn.Module)(), "module"),
        (wrapped_by("DeepSpeedEngine", "deepspeed.runtime.engine", nn.Module)(), "module"),
        (wrapped_by("_FabricOptimizer", "lightning.fabric.wrappers", object)(), "optimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_parallel_already_is_refused_by_name(thing: Any, inside: str) -> None:
    run = paceline.start(device="cpu", progress="off")
    said = rf"run\.prepare\({type(thing).__name__}\).*Delete the call.*attribute \.{inside}\)"
    with pytest.raises(UsageError, match=said):
        run.prepare(thing)
    own = DistributedDataParallel()
    assert run.prepare(own) is own
    run.close()


def test_a_file_of_a_wrapped_model_is_loaded_by_torchs_own_helper(tmp_path: Path) -> None:
    """As the guide shows it."""
    model = nn.Linear(4, 1)
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "wrapped.pt")
    weights = torch.load(tmp_path / "wrapped.pt", weights_only=True)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "module.")
    loaded = nn.Linear(4, 1)
    loaded.load_state_dict(weights)
    run = paceline.start(device="cpu", progress="off")
    loaded, optimizer = run.prepare(loaded, torch.optim.SGD(loaded.parameters(), lr=0.0))
    for x, y in run.loader(TensorDataset(X, Y), global_batch=12):
        run.backward(F.mse_loss(loaded(x), y))
        run.step(optimizer)
    run.export(tmp_path / "plain.safetensors", loaded)
    run.close()
    written = load_file(tmp_path / "plain.safetensors")
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())
