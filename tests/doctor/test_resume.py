"""`paceline doctor --resume`: trainings that are killed and resumed.

The scripts of resume_scripts/ were written by an author who did not know how the command judges. Another program
(resume_scripts/truth.py) measured their truth, by the final weights of an undisturbed and of a resumed run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.resume.resume_command import with_latest
from paceline.doctor.resume.resume_rules import Recorded, compare, save_in_second_epoch

SCRIPTS = Path(__file__).parent / "resume_scripts"
CASES: dict[str, Any] = json.loads((SCRIPTS / "cases.json").read_text())
MODULES = {"Accelerate": "accelerate", "Lightning Trainer": "lightning", "Lightning Fabric": "lightning"}
SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2


# --- the rules, on records of a made-up training of two ranks


def update(step: int, **changed: Any) -> dict[str, Any]:
    """The record of one update of a training in which everything depends on the step."""
    state = {
        "weight": {"w": [f"w{step}", "float32", 1.0 + step, 2.0]},
        "exp_avg": {"w": [f"m{step}", "float32", 0.1 * step, 0.2]},
    }
    record = {
        "optimizer": 0,
        "at": ["train.py", 30],
        "state": state,
        "options": [{"lr": 1.0 / (1 + step)}],
        "scale": [],
        "half": "",
        "inputs": [[f"row{step}"]],
        "indices": [[step]],
        "random": {"torch": f"r{step}"},
        "gradients": {"w": f"g{step}"},
        "files": f"file{step // 4}" if step >= 4 else "",
    }
    return record | changed


def training(first: int, last: int, **changed: Any) -> Recorded:
    """The updates of two ranks, which read different rows. changed: fields of the first update."""
    ranks = [
        [
            update(step, inputs=[[f"row{step}-{rank}"]]) | (changed if step == first else {})
            for step in range(first, last)
        ]
        for rank in range(2)
    ]
    return Recorded(ranks, [], ended=True)


def judge(resumed: Recorded, whole: bool = True) -> list[str]:
    return [found.cause for found in compare(training(0, 20), training(0, 11), resumed, whole).found]


def test_a_resume_that_continues_has_no_finding() -> None:
    judged = compare(training(0, 20), training(0, 11), training(8, 20), whole=True)
    assert (judged.begins, judged.compared, judged.found, judged.notes) == (8, 12, [], [])


def test_each_thing_that_is_not_restored_has_its_cause() -> None:
    weights = update(8)["state"]
    assert judge(training(8, 20, state={**weights, "exp_avg": {}})) == ["optimizer_state"]
    half = {**weights, "exp_avg": {"w": ["m8", "float16", 0.8, 0.2]}}
    assert judge(training(8, 20, state=half)) == ["optimizer_state"]
    rounded = {**weights, "weight": {"w": ["other", "float32", 9.0001, 2.0]}}
    assert judge(training(8, 20, state=rounded, half="float16")) == ["weights"]
    assert judge(training(8, 20, options=[{"lr": 1.0}])) == ["options"]
    assert judge(training(8, 20, scale=[65536.0])) == ["loss_scale"]
    assert judge(training(8, 20, gradients={"w": "x"}, random={"torch": "x"})) == ["random_numbers"]
    assert judge(training(8, 20, gradients={"w": "x"})) == ["gradients"]
    assert judge(training(8, 18)) == ["length"]
    assert judge(training(8, 18), whole=False) == []


def test_a_new_training_has_restored_nothing() -> None:
    assert judge(training(0, 20)) == ["nothing_restored"]


def test_the_checkpoint_before_the_newest() -> None:
    assert judge(training(4, 20)) == ["older_checkpoint"]


def test_examples_that_are_skipped_repeated_or_others() -> None:
    def with_rows(shift: int) -> Recorded:
        resumed = training(8, 20)
        for rank, updates in enumerate(resumed.ranks):
            for number, one in enumerate(updates):
                one["inputs"] = [[f"row{8 + number + shift}-{rank}"]]
                one["indices"] = [[8 + number + shift]]
        return resumed

    assert judge(with_rows(1)) == ["examples_skipped"]
    assert judge(with_rows(-2)) == ["examples_repeated"]
    assert judge(with_rows(1000)) == ["examples_reordered"]
    augmented = with_rows(1000)
    for updates in augmented.ranks:
        for number, one in enumerate(updates):
            one["indices"] = [[8 + number]]
    assert judge(augmented) == ["augmentations"]


def test_on_another_number_of_processes_the_examples_of_all_ranks_count() -> None:
    resumed = training(8, 20)
    one_rank = [
        {**mine, "inputs": [[*mine["inputs"][0], *other["inputs"][0]]]}
        for mine, other in zip(*resumed.ranks, strict=True)
    ]
    assert judge(Recorded([one_rank], [], ended=True)) == []


def test_an_order_without_a_seed_is_compared_with_the_killed_run_only() -> None:
    undisturbed = training(0, 20)
    for updates in undisturbed.ranks:
        for one in updates:
            one["inputs"] = [["another"]]
            one["gradients"] = {"w": "another"}
    judged = compare(undisturbed, training(0, 11), training(8, 20), whole=True)
    assert judged.found == []
    assert judged.compared == 3
    assert any("order is not seeded" in note for note in judged.notes)


def test_the_kill_comes_after_a_save_in_a_second_pass() -> None:
    updates = [update(step, indices=[[step % 6]]) for step in range(20)]  # six batches in a pass, saves after 4, 8, ...
    assert save_in_second_epoch(updates) == 9
    assert save_in_second_epoch([update(step) for step in range(20)]) == 0


def test_the_latest_checkpoint_is_a_finished_one(tmp_path: Path) -> None:
    for age, name in enumerate(("step_4.pt", "step_8.pt", ".unfinished", "step_12.pt.part", "step_12.tmp")):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    assert with_latest("--from={latest}", str(tmp_path)) == f"--from={tmp_path / 'step_8.pt'}"


# --- the command


def doctor(folder: Path, *line: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    found = folder / "found.json"
    command = [sys.executable, "-m", "paceline", "doctor", "--resume", "--json", str(found), "--seed", "1", *line]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    return done, json.loads(found.read_text()) if found.exists() else None


IN_CI = ("clouds_ema",)

# A script with a fault -> the causes that are found.
FOUND = {
    "churn_dropout": {"random_numbers"},
    "denoiser": {"copy"},
    "glyph_cnn": {"buffers"},
    "lines_gpt": {"optimizer_state", "options", "examples_repeated", "length"},
    "masked_bert": {"augmentations"},
    "orbits_fabric": {"options"},
    "pos_tagger": {"examples_skipped", "length"},
    "shard_lm": {"optimizer_state"},
    "species_fabric": {"examples_repeated"},
    "topics_bert": {"weights"},
    "weather_lit": {"examples_repeated"},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.conformance if n in IN_CI else pytest.mark.full) for n in CASES]
)
def test_scripts_in_four_tools(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    pytest.importorskip(MODULES.get(case["tool"], "transformers" if "rans" in case["tool"] else "torch"))
    again = case["resume_args"].replace("{out}", "out")
    args = case["args"].replace("{out}", "out").split()
    done, found = doctor(tmp_path, "--checkpoints", "out", "--resume-args", again, str(SCRIPTS / f"{name}.py"), *args)
    assert done.returncode == (DIFFERENT if case["faulty"] else SAME), done.stdout + done.stderr
    causes = {one["cause"] for one in found["findings"]}
    if name == "sentiment":  # the first epoch's order: which of its examples were used depends on the last save
        assert causes in ({"examples_reordered"}, {"examples_repeated"})
    else:
        assert causes == FOUND.get(name, set())
    assert not (tmp_path / "out").exists()  # it was not there before


@pytest.mark.conformance
def test_a_script_without_a_checkpoint_cannot_be_judged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(6):\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done, found = doctor(tmp_path, "--checkpoints", "out", str(script))
    assert done.returncode == NOT_COMPARED, done.stdout + done.stderr
    assert "No file appeared in out, and the run ended at update 6" in found["not_compared"]


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    (tmp_path / "train.py").write_text("")
    done, found = doctor(tmp_path, "--checkpoints", "out", "train.py")
    assert done.returncode == 2
    assert found is None
    assert "--checkpoints out: the folder is not empty" in done.stderr
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["train.py"], "--resume needs --checkpoints DIR"),
        (["--checkpoints", "out", "--resume-args", "'--a", "train.py"], "Close the quotation mark"),
        (
            ["--checkpoints", "out", "--steps", "0", "train.py"],
            "--steps 0: give the number of optimizer steps",
        ),
    ],
)
def test_wrong_options(line: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done, _ = doctor(tmp_path, *line)
    assert done.returncode == 2
    assert words in done.stderr


def test_options_of_a_resume_need_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    line = [sys.executable, "-m", "paceline", "doctor", "--checkpoints", "out", "train.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--checkpoints needs --resume" in done.stderr
