"""bert_mlm.py and finetune_lora.py, with BERT and ALBERT, in float64: the weights that they save are the same on one
process, on two, under fsdp and with micro-batches; `from_pretrained` loads them; other folders and files are named."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples import jobs
from tests.ranks import run_ranks

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
for library in ("datasets", "peft", "tokenizers", "transformers"):
    pytest.importorskip(library, reason=f"{library} is not installed: make conformance installs it")

from tests.examples import huggingface_jobs as its  # noqa: E402

BOUND = 1e-10  # they come to 4e-15
RUNS = {
    "one": (1, "", ""),
    "two": (2, "", ""),
    "micro-batches": (2, "", "--micro-batch 2"),
    "fsdp": (2, "fsdp:min_params=1000", ""),
    "stage 1": (2, "fsdp:stage=1", ""),
}
BESIDE_ONE = [
    "micro-batches",
    "fsdp",
    pytest.param("two", marks=pytest.mark.full),
    pytest.param("stage 1", marks=pytest.mark.full),
]


class Results:
    """What the examples left and printed, by the name of a run. A run is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._printed = folder, dict[str, dict[str, str]]()

    def printed(self, run: str) -> dict[str, str]:
        if run not in self._printed:
            size, strategy, arguments = RUNS[run]
            target = "tests.examples.huggingface_jobs:run"
            self._printed[run] = run_ranks(size, target, run, strategy, arguments, deadline=600)[0]
        return self._printed[run]

    def distance(self, what: str, run: str, *file: str) -> float:
        self.printed("one"), self.printed(run)
        return its.distance(*(its.weights(self.folder, f"{what}.{name}", *file) for name in ("one", run)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("huggingface")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(jobs.EXAMPLES)
        patch.setenv(its.FOLDER, str(folder))
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        its.make_models(folder)
        yield Results(folder)


@pytest.mark.parametrize("kind", its.KINDS)
@pytest.mark.parametrize("run", BESIDE_ONE)
def test_masked_language_models_are_the_same(results: Results, run: str, kind: str) -> None:
    assert results.distance(f"{kind}.bert_mlm", run, "model.safetensors") <= BOUND


@pytest.mark.parametrize("kind", its.KINDS)
@pytest.mark.parametrize("run", BESIDE_ONE)
def test_adapters_and_frozen_weights_are_the_same(results: Results, run: str, kind: str) -> None:
    assert results.distance(f"{kind}.finetune_lora", run, "adapter_model.safetensors") <= BOUND
    assert results.distance(f"{kind}.finetune_lora", run, "whole", "model.safetensors") <= BOUND


@pytest.mark.parametrize("kind", its.KINDS)
@pytest.mark.parametrize("run", ["one", "fsdp"])
def test_from_pretrained_loads_what_was_trained(results: Results, run: str, kind: str) -> None:
    """The adapter on its base, and the merged model, answer as the exported weights do."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

    results.printed(run)
    trained = AutoModelForMaskedLM.from_pretrained(results.folder / f"{kind}.bert_mlm.{run}").state_dict()
    for name, value in its.weights(results.folder, f"{kind}.bert_mlm.{run}", "model.safetensors").items():
        assert torch.equal(trained[name], value)

    saved = results.folder / f"{kind}.finetune_lora.{run}"
    tokens = torch.arange(5, 25).view(2, 10)
    untrained = AutoModelForSequenceClassification.from_pretrained(results.folder / kind, num_labels=3)
    adapted = PeftModel.from_pretrained(untrained, saved).eval()(tokens).logits
    merged = AutoModelForSequenceClassification.from_pretrained(saved / "merged").eval()(tokens).logits
    how = LoraConfig.from_pretrained(saved)
    again = AutoModelForSequenceClassification.from_pretrained(results.folder / kind, num_labels=3)
    whole = get_peft_model(again, how)
    whole.load_state_dict(its.weights(saved, "whole", "model.safetensors"))
    expected = whole.eval()(tokens).logits
    torch.testing.assert_close(adapted, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(merged, expected, rtol=1e-10, atol=1e-12)
    assert (saved / "adapter_model.safetensors").stat().st_size < (saved / "whole" / "model.safetensors").stat().st_size


@pytest.mark.full
@pytest.mark.parametrize(("example", "kind"), [("bert_mlm", "albert"), ("finetune_lora", "bert")])
def test_verify_finds_one_model(results: Results, example: str, kind: str) -> None:
    script = [str(jobs.EXAMPLES / f"{example}.py"), "--data", str(results.folder / "text.txt")]
    command = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "3", *script]
    done = subprocess.run(
        [*command, "--model", str(results.folder / kind), "--global-batch", "8"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fails(example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(jobs.EXAMPLES / example), run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err.split("error:")[1]


@pytest.mark.parametrize("example", ["bert_mlm.py", "finetune_lora.py"])
def test_other_data_and_models_are_named(
    example: str,
    results: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(data: Path, model: Path) -> str:
        return fails(example, capsys, monkeypatch, "--data", str(data), "--model", str(model))

    text, bert = results.folder / "text.txt", results.folder / "bert"
    assert "--data" in said(tmp_path / "nowhere", bert)
    (tmp_path / "short.txt").write_text("a line\n")
    assert "too few" in said(tmp_path / "short.txt", bert)
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\xff\xfe")
    assert "no text in UTF-8" in said(tmp_path / "image.txt", bert)
    for missing, words in (
        ("model.safetensors", "no file named model.safetensors"),
        ("tokenizer.json", "a model and no tokenizer"),
        ("config.json", "model_type"),
    ):
        folder = tmp_path / f"without {missing}"
        shutil.copytree(bert, folder)
        os.remove(folder / missing)
        answer = said(text, folder)
        assert words in answer
        assert str(folder) in answer
        assert "examples/wikitext.py" in answer
    assert "examples/wikitext.py" in said(text, tmp_path / "no folder")
    (tmp_path / "empty").mkdir()
    assert "empty': the folder has no config.json. Give --model" in said(text, tmp_path / "empty")
