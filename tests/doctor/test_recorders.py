"""What doctor's recorders make of a tensor, a batch or an output, without a process group."""

from __future__ import annotations

import io
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.doctor.recorders.collective_recorder import CollectiveRecorder
from paceline.doctor.recorders.output_recorder import OutputRecorder
from paceline.doctor.recorders.shared_state import RecorderState, set_number
from paceline.observe.digests import tensors_in
from paceline.observe.patching import Patches


def recorder(model: nn.Module, folder: Path) -> CollectiveRecorder:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_number(optimizer, 0)
    log: Any = SimpleNamespace(shared=RecorderState("", 0, None, optimizers=[optimizer]))
    return CollectiveRecorder(log, str(folder / "collectives.jsonl"))


def test_the_memory_of_a_weight_that_was_moved(tmp_path: Path) -> None:
    """After `p.data = mean` the allocator gives the old memory to another tensor: on another rank to another one."""
    weight = nn.Linear(8, 8, bias=False)
    collectives = recorder(weight, tmp_path)
    before = weight.weight.data
    assert collectives._identify(before) == {"of": "weight", "number": 1}
    weight.weight.data = before + 1.0
    assert collectives._identify(before) == {}


def test_a_copy_of_a_weight(tmp_path: Path) -> None:
    """`mean = p.clone(); all_reduce(mean); p.data = mean` averages weights. No number: weights may be equal."""
    weight = nn.Linear(8, 8, bias=False)
    collectives = recorder(weight, tmp_path)
    assert collectives._identify(weight.weight.detach().clone()) == {"of": "weight", "copy": True}
    assert collectives._identify(torch.randn(8, 8)) == {}
    collectives.log.shared.backward_since_step = True  # a gradient may have these values, just before the step
    assert collectives._identify(weight.weight.detach().clone()) == {}


def test_batches_that_are_no_dicts() -> None:
    """transformers' BatchEncoding, which tokenizer.pad and its collate functions return, is a UserDict."""
    ids, labels = torch.arange(6).view(2, 3), torch.zeros(2)
    assert [id(t) for t in tensors_in(UserDict(input_ids=ids, rest=[labels]))] == [id(ids), id(labels)]


def test_prints_into_memory() -> None:
    said: list[str] = []
    stack, variables = SimpleNamespace(caller=lambda: ["train.py", 7]), SimpleNamespace(numbers=dict)
    log: Any = SimpleNamespace(stack=stack, shared=RecorderState("", 0, None, variables=variables), few=lambda *_: True)
    log.record = lambda _, **fields: said.append(fields["text"])
    module = SimpleNamespace(print=print)
    Patches().around(module, "print", OutputRecorder(log).around_print)
    module.print("accuracy 0.5", file=io.StringIO())
    module.print("accuracy 0.7")
    assert said == ["accuracy 0.7"]
