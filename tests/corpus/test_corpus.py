"""The corpus of benchmarks/silentdist is what it says, and its core is judged right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.corpus.forked import run_doctor, run_verify, score

from corpus_truth import CORE, OK_SECOND, SECOND, TRUTHS, Fault, fault_lines, fault_of, scripts  # isort: skip

ROOT = Path(__file__).parents[2]
TOOLS = {"ported": "verify", "plain": "doctor"}  # whose causes the truths of a part list
SCRIPTS = [pytest.param(script, id=f"{part}/{script.stem}") for part in TRUTHS for script in scripts(part)]


def script_of(part: str, name: str) -> Path:
    return next(script for script in scripts(part) if script.stem == name)


@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORE["ported"])
def test_verify_is_right_about_the_core(name: str) -> None:
    script = script_of("ported", name)
    judged_right(script, run_verify(script))


@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORE["plain"])
def test_doctor_is_right_about_the_core(name: str) -> None:
    script = script_of("plain", name)
    found = run_doctor(script)
    assert found["text"] is None, found["text"]
    judged_right(script, found)


def judged_right(script: Path, record: dict[str, Any]) -> None:
    """The fault is found, with the right cause, at a marked line; a healthy script is not accused."""
    if fault_of(script):
        verdict = score.judged(script, record)
        assert (verdict["found"], verdict["cause"], verdict["line"]) == (True, True, True), record
    else:
        assert record["code"] == 0, record


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_is_faulty_with_marked_lines_or_healthy(script: Path) -> None:
    compile(script.read_text(), script.name, "exec")
    healthy = script.stem.startswith("ok_")
    assert (fault_of(script) is None) == healthy
    assert (fault_lines(script) == set()) == healthy


@pytest.mark.parametrize("part", TRUTHS)
def test_causes_that_count_as_right_are_names_of_the_tool(part: str) -> None:
    folder = ROOT / "src/paceline" / TOOLS[part]
    names = {name for file in folder.rglob("*.py") for name in re.findall(r'"([a-z_-]+)"', file.read_text())}
    assert {cause for fault in TRUTHS[part].values() for cause in fault.causes} - names == set()
    assert set(TRUTHS[part]) == {script.stem for script in scripts(part) if not script.stem.startswith("ok_")}


def test_results_are_judged_by_the_truths() -> None:
    script = script_of("plain", "ddp_no_sampler")
    line = min(fault_lines(script))
    right = {"cause": "same_examples", "changes_model": True, "file": str(script), "line": line, "beside": None}

    def verdict(*findings: dict[str, object]) -> tuple[bool, bool, bool]:
        code = int(any(one["changes_model"] for one in findings))
        found = score.judged(script, {"code": code, **score.named("doctor", {"findings": list(findings)}, script)})
        return found["found"], found["cause"], found["line"]

    assert verdict(right) == (True, True, True)
    assert verdict(right | {"line": 1}) == (True, True, False)
    assert verdict(right | {"line": 1, "beside": f"{script}:{line}"}) == (True, True, True)
    assert verdict(right | {"file": "other.py"}) == (True, True, False)
    assert verdict(right | {"cause": "factor"}) == (True, False, True)
    assert verdict(right | {"changes_model": False}) == (True, True, True)  # the fault is named, as a note
    assert verdict(right | {"changes_model": False, "cause": "lr_not_scaled"}) == (False, False, False)
    assert verdict() == (False, False, False)

    def of_verify(name: str, code: int, cause: str | None) -> tuple[bool, bool]:
        found = score.judged(script_of("ported", name), {"code": code, "causes": [cause], "lines": [], "notes": {}})
        return found["found"], found["cause"]

    assert of_verify("time_seed", 0, None) == (False, False)
    assert of_verify("time_seed", 2, "not-deterministic") == (True, True)
    assert of_verify("mixup_flip", 2, "not-deterministic") == (False, False)
    assert of_verify("mixup_flip", 1, "control-by-rank") == (True, False)


@pytest.mark.parametrize("part", TRUTHS)
def test_the_second_set_is_named_whole(part: str) -> None:
    healthy = {script.stem for script in scripts(part) if script.stem.startswith("ok_")}
    assert OK_SECOND[part] < healthy
    assert SECOND[part] < {script.stem for script in scripts(part)}


@pytest.mark.parametrize(("part", "tool"), score.CORPUS)
def test_all_scripts_were_scored(part: str, tool: str) -> None:
    recorded = json.loads(score.RESULTS.read_text())
    scored = {name for name, record in recorded["corpus"][part].items() if tool in record}
    assert scored == {script.stem for script in scripts(part)}  # none chosen
    assert recorded["figures"] == score.all_figures(recorded)
    page = (ROOT / "docs/silentdist.md").read_text()
    assert [row for row in score.table(recorded).splitlines() if row not in page] == [], "score.py table"


def test_a_fault_has_a_kind_and_a_sentence() -> None:
    for fault in (*TRUTHS["ported"].values(), *TRUTHS["plain"].values()):
        assert isinstance(fault, Fault)
        assert fault.kind
        assert fault.wrong.endswith(".")
