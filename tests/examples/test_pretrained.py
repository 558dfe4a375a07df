"""examples/pretrained.py: what fits is loaded, what does not is listed, and other files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.examples.jobs import EXAMPLES
from torch import nn


@pytest.fixture
def pretrained(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import pretrained

    return pretrained


def network(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(classes))


def made(classes: int) -> nn.Sequential:
    model = network(classes)
    model(torch.rand(2, 3, 4, 4))
    return model


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_another_head_is_skipped_and_listed(pretrained: Any, tmp_path: Path, suffix: str) -> None:
    source, model, file = made(7), made(3), tmp_path / f"weights{suffix}"
    given = {name: value for name, value in source.state_dict().items() if name != "1.running_var"}
    given["extra"] = torch.ones(2)
    save_file(given, file) if suffix == ".safetensors" else torch.save(given, file)
    head = model[3].weight.detach().clone()
    assert pretrained.load_weights(model, file) == [
        "1.running_var: not in the file",
        "3.bias: (7,) in the file, (3,) here",
        "3.weight: (7, 16) in the file, (3, 16) here",
        "extra: (2,) in the file, not in the model",
    ]
    assert torch.equal(model[0].weight, source[0].weight)
    assert torch.equal(model[1].running_mean, source[1].running_mean)
    assert torch.equal(model[3].weight, head)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_other_files_are_named(pretrained: Any, tmp_path: Path, name: str) -> None:
    def said() -> str:
        with pytest.raises(pretrained.WeightsError) as raised:
            pretrained.load_weights(made(3), tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
        return str(raised.value)

    assert "there is no such file" in said()
    (tmp_path / name).write_text("hi, this is a text")
    assert "neither safetensors nor a state dict" in said()
    assert "run.export, or torch.save(model.state_dict(), FILE), writes one" in said()
