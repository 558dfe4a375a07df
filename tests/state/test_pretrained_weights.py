"""Weights from and to directories in Hugging Face's layout, under every strategy, compared with transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.strategies import checks
from torch import Tensor, nn

from paceline.comm import dtensor
from paceline.comm.mesh import world_group
from paceline.errors import CheckpointError, SettingError, UsageError
from paceline.state import pretrained, sharded_export
from paceline.state.plain_files import checksums_of, compare_checksums

transformers = pytest.importorskip("transformers", reason="Hugging Face's models are what is tested")
pytestmark = pytest.mark.conformance

TOKENS = torch.arange(12).reshape(2, 6) % 11


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(**options: Any) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2, **options)
    )


def built(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make().eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS).logits
        return found


def by_rank_0(folder: Path, make: Callable[[], Any], shards: str = "1KB") -> Tensor:
    """Have transformers write a model into a folder. Returns its logits."""
    model = built(make)
    if world_group().rank == 0:
        model.save_pretrained(folder, max_shard_size=shards)
    world_group().barrier()
    return logits(model)


STRATEGIES = [
    "ddp",
    "fsdp:min_params=0",
    "fsdp:stage=1",
    "fsdp:stage=2,offload=true",
    "tensor",
    "pipeline:stages=2",
    "local_sgd:every=2",
    "shared",
]


def strategies(*more: str) -> Any:
    return pytest.mark.parametrize("strategy", [*STRATEGIES, *more])


def there_and_back(strategy: str, make: Callable[[], Any], folder: Path) -> None:
    """A model of other weights takes those of a directory, and writes them into another one."""
    expected = by_rank_0(folder / "in", make)
    with checks.started(strategy=strategy) as run:
        model = run.prepare(built(make, seed=1))
        assert run.load_pretrained(folder / "in", model) == ([], [])
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
        run.export(folder / "out", model, shards="1KB")
    world_group().barrier()
    assert json.loads((folder / "out" / pretrained.INDEX).read_text())["weight_map"].keys() == files_of(folder / "in")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    assert type(again) is type(built(make))
    assert torch.equal(logits(again), expected)
    assert again.generation_config is not None


def files_of(folder: Path) -> Any:
    return json.loads((folder / pretrained.INDEX).read_text())["weight_map"].keys()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_one_process(make: Any, tmp_path: Path) -> None:
    there_and_back("single", make, tmp_path)


@pytest.mark.ranks(2)
@strategies()
def test_there_and_back_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    there_and_back(strategy, llama, tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "strategy", ["fsdp:min_params=0", "fsdp:replicate=2,min_params=0", "fsdp+tensor:size=2", "pipeline:stages=2"]
)
def test_there_and_back_on_four_ranks(strategy: str, tmp_path: Path) -> None:
    there_and_back(strategy, gpt2 if strategy == "fsdp:min_params=0" else llama, tmp_path)


def loss_fn(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp:min_params=0", "pipeline:stages=2", "fsdp:stage=1"])
def test_between_two_steps(strategy: str, tmp_path: Path) -> None:
    """Each process reads into what it holds in the middle of training, and exports the weights of that step."""
    expected = by_rank_0(tmp_path / "in", llama)
    with checks.started(strategy=strategy) as run:
        model = built(llama, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        loader = run.loader(list(TOKENS.repeat(4, 1)), global_batch=2)
        for number, batch in enumerate(loader):
            if number == 2:
                run.load_pretrained(tmp_path / "in")
                torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
            if number == 2:
                break
        run.export(tmp_path / "out", shards="1KB")
    plain = built(llama)
    loss_fn(plain, TOKENS).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(again), logits(plain), rtol=1e-4, atol=1e-5)


# Built on meta


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("strategy", ["fsdp:min_params=0", "tensor", "ddp"])
def test_a_model_on_meta_takes_the_weights_of_from_pretrained(strategy: str, make: Any, tmp_path: Path) -> None:
    """With rotary tables, which are in no file, and with tied weights (GPT-2)."""
    expected = by_rank_0(tmp_path / "in", make)
    with checks.started(strategy=strategy) as run:
        with torch.device("meta"):
            model = make().eval()
        run.prepare(model, init=False)
        assert run.load_pretrained(tmp_path / "in") == ([], [])
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_on_meta_begins_with_the_scales_of_its_class(make: Any) -> None:
    found: list[dict[str, Tensor]] = []
    for strategy in ("ddp", "fsdp:min_params=0"):
        with checks.started(strategy=strategy) as run:
            with torch.device("meta"):
                model = make()
            run.prepare(model)
            named = [*model.named_parameters(), *model.named_buffers()]
            found.append({name: dtensor.whole(t).detach().clone() for name, t in named})
    plain = built(make)
    for name, value in [*plain.named_parameters(), *plain.named_buffers()]:
        first, second = found[0][name], found[1][name]
        assert torch.equal(first, second), name
        if value.dim() > 1:
            assert 0.5 < first.std() / value.std() < 2, name
        else:
            assert torch.equal(first, value), name  # norms, biases, rotary tables


# Which tensors


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp:min_params=0", "pipeline:stages=2"])
def test_tied_weights_are_in_the_files_once_and_stay_tied(strategy: str, tmp_path: Path) -> None:
    def tied() -> Any:
        return llama(tie_word_embeddings=True)

    expected = by_rank_0(tmp_path / "in", tied)
    with checks.started(strategy=strategy) as run:
        model = run.prepare(built(tied, seed=1))
        assert run.load_pretrained(tmp_path / "in").missing == []
        assert model.lm_head.weight is model.model.embed_tokens.weight
        run.export(tmp_path / "out", shards="1MB")
    world_group().barrier()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == files_of(tmp_path / "in")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(again), expected)


@pytest.mark.ranks(2)
def test_a_base_model_into_a_model_with_a_head_and_the_reverse(tmp_path: Path) -> None:
    by_rank_0(tmp_path / "head", llama)
    whole = built(llama)
    if world_group().rank == 0:
        whole.model.save_pretrained(tmp_path / "base")
    world_group().barrier()
    with checks.started(strategy="fsdp:min_params=0") as run:
        model = run.prepare(built(llama, seed=1))
        before = model.lm_head.weight.full_tensor().clone()
        with pytest.raises(CheckpointError, match=r"lacks 1 tensor\(s\) of LlamaForCausalLM: lm_head\.weight\."):
            run.load_pretrained(tmp_path / "base")
        assert run.load_pretrained(tmp_path / "base", missing_ok=True) == (["lm_head.weight"], [])
        assert torch.equal(model.model.norm.weight.full_tensor(), whole.model.norm.weight)
        assert torch.equal(model.model.embed_tokens.weight.full_tensor(), whole.model.embed_tokens.weight)
        assert torch.equal(model.lm_head.weight.full_tensor(), before)
        base = run.prepare(transformers.LlamaModel(whole.config))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert run.load_pretrained(tmp_path / "head", base).unexpected == ["lm_head.weight"]
        told = [one for one in found if "1 tensor(s) that LlamaModel does not have" in str(one.message)]
        assert len(told) == (world_group().rank == 0)
        assert torch.equal(base.embed_tokens.weight.full_tensor(), whole.model.embed_tokens.weight)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """One file, written by rank 0."""
    folder.mkdir(exist_ok=True)
    if world_group().rank == 0:
        save_file(tensors, folder / "model.safetensors")
    world_group().barrier()
    return folder


@pytest.mark.ranks(2)
@pytest.mark.parametrize("names", [{"module.": ""}, lambda name: name.removeprefix("module.")])
def test_names_are_mapped_dtypes_converted_and_buffers_read(names: Any, tmp_path: Path) -> None:
    state = {
        name: torch.randn(t.shape).bfloat16() if t.is_floating_point() else t + 7
        for name, t in chain().state_dict().items()
    }
    state = world_group().broadcast(state)
    folder = written(tmp_path / "in", {f"module.{name}": t for name, t in state.items()})
    with checks.started(strategy="fsdp:min_params=0") as run:
        model = run.prepare(chain())
        with pytest.raises(CheckpointError, match=r"other names: module\.0\.bias.*Map names with names="):
            run.load_pretrained(folder)
        assert run.load_pretrained(folder, names=names) == ([], [])
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if dtensor.is_sharded(value) else value
            assert whole.dtype == (torch.float32 if value.is_floating_point() else torch.int64)
            assert torch.equal(whole, state[name].to(whole.dtype))


@pytest.mark.ranks(2)
def test_other_shapes_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    state = chain().state_dict()
    wrong = written(tmp_path / "shape", {**state, "0.weight": torch.ones(5, 4)})
    quantised = written(tmp_path / "dtype", {**state, "0.weight": torch.ones(5, 3, dtype=torch.int8)})
    with checks.started(strategy="fsdp:min_params=0") as run:
        run.prepare(chain())
        with pytest.raises(CheckpointError, match=r"0\.weight: \(5, 3\) in the model, \(5, 4\) in the files"):
            run.load_pretrained(wrong)
        with pytest.raises(CheckpointError, match=r"0\.weight: torch\.float32 in the model, I8 \(quantised\?\)"):
            run.load_pretrained(quantised)
        with pytest.raises(UsageError, match="this Linear was not prepared"):
            run.load_pretrained(wrong, nn.Linear(1, 1))


# Which files


def fill(folder: Path) -> Path:
    """A directory with two shards and an index."""
    state = chain().state_dict()
    half = list(state)[:4]
    shards = {"a.safetensors": half, "b.safetensors": [name for name in state if name not in half]}
    folder.mkdir(exist_ok=True)
    for file, names in shards.items():
        save_file({name: state[name] for name in names}, folder / file)
    placed = {name: file for file, names in shards.items() for name in names}
    (folder / pretrained.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def replaced(folder: Path, weight: str, file: Any) -> None:
    document = json.loads((folder / pretrained.INDEX).read_text())
    document["weight_map"][weight] = file
    (folder / pretrained.INDEX).write_text(json.dumps(document))


HARM: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is missing": (lambda f: (f / "b.safetensors").unlink(), r"b\.safetensors: No such file"),
    "a shard is cut": (lambda f: os.truncate(f / "b.safetensors", 200), r"b\.safetensors is damaged"),
    "a shard is empty": (lambda f: os.truncate(f / "b.safetensors", 0), r"b\.safetensors is damaged"),
    "a shard is a pipe": (lambda f: ((f / "b.safetensors").unlink(), os.mkfifo(f / "b.safetensors")), "it is a pipe"),
    "the index names another directory": (
        lambda f: replaced(f, "0.bias", "../a.safetensors"),
        "no name of a safetensors",
    ),
    "the index names an absolute path": (
        lambda f: replaced(f, "0.bias", "/etc/a.safetensors"),
        "no name of a safetensors",
    ),
    "the index names a pickle": (lambda f: replaced(f, "0.bias", "pytorch_model.bin"), "no name of a safetensors"),
    "the index has numbers": (lambda f: replaced(f, "0.bias", 3), "no name of a safetensors"),
    "the index is no JSON": (lambda f: (f / pretrained.INDEX).write_text("{"), r"index\.json is damaged"),
    "the index is a list": (lambda f: (f / pretrained.INDEX).write_text("[1]"), r"index\.json is damaged"),
    "the index has no map": (
        lambda f: (f / pretrained.INDEX).write_text('{"weight_map": 1}'),
        r"index\.json is damaged",
    ),
    "the index misplaces a tensor": (
        lambda f: replaced(f, "0.bias", "b.safetensors"),
        r"b\.safetensors lacks 1 tensor",
    ),
    "there is only a pickle": (
        lambda f: (shutil.rmtree(f), f.mkdir(), (f / "pytorch_model.bin").touch()),
        r"neither .*It has pytorch_model\.bin\. Convert",
    ),
    "there is nothing": (shutil.rmtree, r"no directory or file.*snapshot_download"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", HARM)
def test_harmed_files_are_named_on_all_ranks(case: str, tmp_path: Path) -> None:
    harm, message = HARM[case]
    if world_group().rank == 0:
        harm(fill(tmp_path / "in"))
    world_group().barrier()
    with checks.started(strategy="fsdp:min_params=0") as run:
        model = run.prepare(chain())
        before = model[0].weight.full_tensor().clone()
        with pytest.raises(CheckpointError, match=message):
            run.load_pretrained(tmp_path / "in")
        assert torch.equal(model[0].weight.full_tensor(), before)


@pytest.mark.ranks(2)
def test_links_to_files_as_in_the_hubs_cache(tmp_path: Path) -> None:
    if world_group().rank == 0:
        fill(tmp_path / "blobs")
        (tmp_path / "snapshot").mkdir()
        for file in (tmp_path / "blobs").iterdir():
            (tmp_path / "snapshot" / file.name).symlink_to(file)
    world_group().barrier()
    with checks.started(strategy="fsdp:min_params=0") as run:
        model = run.prepare(chain())
        assert run.load_pretrained(tmp_path / "snapshot") == ([], [])
        assert torch.equal(model[0].bias.full_tensor(), load_file(tmp_path / "blobs" / "a.safetensors")["0.bias"])


@pytest.mark.ranks(2)
def test_a_disk_that_not_all_ranks_see(tmp_path: Path) -> None:
    own = tmp_path / f"disk-{dist.get_rank()}"
    if dist.get_rank() == 0:
        fill(own)
    with checks.started(strategy="fsdp:min_params=0") as run:
        model = run.prepare(chain())
        assert run.load_pretrained(own) == ([], [])
        whole = {name: t.full_tensor() if dtensor.is_sharded(t) else t for name, t in model.state_dict().items()}
    for file in ("a", "b"):
        for name, value in load_file(tmp_path / "disk-0" / f"{file}.safetensors").items():
            assert torch.equal(whole[name], value)


@pytest.mark.ranks(2)
def test_a_rank_that_cannot_read_fails_on_all(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        fill(tmp_path / "in")
    world_group().barrier()
    with checks.started(strategy="fsdp:min_params=0") as run, pytest.MonkeyPatch.context() as patch:
        run.prepare(chain())
        if dist.get_rank() == 1:

            def broken(*_: Any) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(pretrained.SliceReader, "read", broken)
        with pytest.raises(CheckpointError, match=r"^rank 1: .*Input/output error"):
            run.load_pretrained(tmp_path / "in")


# Exports


@pytest.mark.parametrize(
    ("given", "size"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2KiB", 2048), (100, 100), ("7b", 7)],
)
def test_sizes_of_shards(given: Any, size: int) -> None:
    assert sharded_export.bytes_of(given) == size


@pytest.mark.parametrize("given", ["5", "GB", "0GB", "-1GB", 0, True, 1.5, "5XB"])
def test_sizes_that_are_refused(given: Any) -> None:
    with pytest.raises(SettingError, match="give the largest size of a shard"):
        sharded_export.bytes_of(given)


OTHERS = ["model-20261129.safetensors", "model-best.safetensors", "tokenizer.json"]


@pytest.mark.ranks(2)
def test_an_older_export_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    with checks.started(strategy="fsdp:min_params=0") as run:
        model = run.prepare(chain())
        run.export(tmp_path / "out", shards=64)
        if world_group().rank == 0:
            assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
            for other in OTHERS:
                (tmp_path / "out" / other).write_text("{}")
        run.export(tmp_path / "out", shards="1MB")
        state = {name: t.full_tensor() if dtensor.is_sharded(t) else t for name, t in model.state_dict().items()}
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(["model.safetensors", "model.safetensors.sha256", *OTHERS])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    done = subprocess.run(["sha256sum", "--check", "model.safetensors.sha256"], cwd=tmp_path / "out", check=False)
    assert done.returncode == 0


@pytest.mark.ranks(2)
def test_a_rank_0_that_cannot_write_fails_on_all(tmp_path: Path) -> None:
    with checks.started(strategy="fsdp:min_params=0") as run:
        run.prepare(chain())
        if dist.get_rank() == 0:
            (tmp_path / "file").touch()
        world_group().barrier()
        with pytest.raises(CheckpointError, match=r"could not be exported.*it is a file"):
            run.export(tmp_path / "file", shards="1MB")
        with pytest.MonkeyPatch.context() as patch:

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(sharded_export, "save_tensors", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                run.export(tmp_path / "out", shards=64)
        world_group().barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


KILLED = """
import os, sys
import torch
import paceline
run = paceline.start(device="cpu", progress="off")
model = run.prepare(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
folder, old, new = sys.argv[1:]

def export(value, shards, path):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    run.export(path, shards=shards)

def killed_before(number, change):
    def changed(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
        return change(*args, **kwargs)
    left = [number]
    return changed

for number in range(99):
    path = f"{folder}/{number}"
    export(1, old, path)
    pid = os.fork()
    if pid == 0:
        for name in ("replace", "rename", "unlink"):
            setattr(os, name, killed_before(number, getattr(os, name)))
        export(2, new, path)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status):
        sys.exit(status)
"""


def as_transformers_reads(folder: Path) -> dict[str, Tensor]:
    """The only file if there is one, otherwise those of the index."""
    if (folder / pretrained.WHOLE).exists():
        return load_file(folder / pretrained.WHOLE)
    placed = json.loads((folder / pretrained.INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in placed.items()}


@pytest.mark.parametrize("new", ["64B", "1MB"], ids=["to_several", "to_one"])
@pytest.mark.parametrize("old", ["64B", "1MB"], ids=["from_several", "from_one"])
def test_a_crash_leaves_the_older_weights_or_the_new_ones(old: str, new: str, tmp_path: Path) -> None:
    """Killed before each change of the file system."""
    (tmp_path / "script.py").write_text(KILLED)
    (tmp_path / "out").mkdir()
    line = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "out"), old, new]
    subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=120)
    folders = sorted((one for one in (tmp_path / "out").iterdir() if one.name.isdigit()), key=lambda one: int(one.name))
    assert len(folders) > 2
    values = []
    for folder in folders:
        found = as_transformers_reads(folder)
        assert found.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        (value,) = {float(one) for tensor in found.values() for one in tensor.flatten()}
        values.append(value)
        with checks.started() as run:
            model = run.prepare(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
            assert run.load_pretrained(folder) == ([], [])
            assert all((p == value).all() for p in model.parameters())
        named = folder / (pretrained.WHOLE if (folder / pretrained.WHOLE).exists() else pretrained.INDEX)
        assert not checksums_of(named).exists() or not compare_checksums(named)
    assert values == sorted(values)
    assert set(values) == {1, 2}
    left = [one.name for one in folders[-1].iterdir()]  # of the export that was not killed
    assert len(left) == (2 if new == "1MB" else 5)


@pytest.mark.ranks(1)
def test_a_single_file_counts_more_than_an_index_as_in_transformers(tmp_path: Path) -> None:
    by_rank_0(tmp_path / "in", llama)
    newer = built(llama, seed=1)
    save_file({name: t.clone() for name, t in newer.state_dict().items()}, tmp_path / "in" / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").eval()
    with checks.started() as run:
        model = run.prepare(built(llama, seed=2))
        run.load_pretrained(tmp_path / "in")
        assert torch.equal(logits(model), logits(theirs))
        assert torch.equal(logits(model), logits(newer))
