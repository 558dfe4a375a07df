"""The corpus is what it says, and the docs show what was measured on it (measure.py, `make corpus`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.corpus.measure import judged, parts, run_doctor, run_verify, script_of, table
from tests.corpus.truth import CORE, OK_SECOND, SECOND, TRUTHS, Fault, fault_lines, fault_of, scripts

ROOT = Path(__file__).parents[2]
SCRIPTS = [pytest.param(script, id=f"{tool}/{script.stem}") for tool in TRUTHS for script in scripts(tool)]
RESULTS = {
    (tool, kind): ROOT / f"benchmarks/results/corpus_{tool}_{kind}.json"
    for tool in TRUTHS
    for kind in ("blind", "second", "now")
}


@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORE["verify"])
def test_verify_is_right_about_the_core(name: str) -> None:
    judged_right("verify", name, run_verify(script_of("verify", name)))


@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORE["doctor"])
def test_doctor_is_right_about_the_core(name: str) -> None:
    found = run_doctor(script_of("doctor", name))
    assert found["failed"] is None, found["failed"]
    judged_right("doctor", name, found)


def judged_right(tool: str, name: str, result: dict[str, Any]) -> None:
    """The fault is found, with the right cause, at a marked line; a healthy script is not accused."""
    verdict = judged(tool, name, result)
    if verdict["fault"]:
        assert (verdict["found"], verdict["cause"], verdict["line"]) == (True, True, True), result
    else:
        assert (verdict["accused"], verdict["unclear"]) == (False, False), result


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_is_faulty_with_marked_lines_or_healthy(script: Path) -> None:
    compile(script.read_text(), script.name, "exec")
    healthy = script.stem.startswith("ok_")
    assert (fault_of(script) is None) == healthy
    assert (fault_lines(script) == set()) == healthy


@pytest.mark.parametrize("tool", TRUTHS)
def test_causes_that_count_as_right_are_names_of_the_tool(tool: str) -> None:
    folder = ROOT / "src/paceline" / tool
    names = {name for file in folder.rglob("*.py") for name in re.findall(r'"([a-z_-]+)"', file.read_text())}
    assert {cause for fault in TRUTHS[tool].values() for cause in fault.causes} - names == set()
    assert set(TRUTHS[tool]) == {script.stem for script in scripts(tool) if not script.stem.startswith("ok_")}


def test_results_are_judged_by_the_truths() -> None:
    line = min(fault_lines(next(s for s in scripts("doctor") if s.stem == "ddp_no_sampler")))
    right = {"cause": "same_examples", "changes_model": True, "file": "ddp_no_sampler.py", "line": line}
    note = {"cause": "lr_not_scaled", "changes_model": False, "file": "ddp_no_sampler.py", "line": line}

    def verdict(*findings: dict[str, object]) -> tuple[bool, bool, bool]:
        found = judged("doctor", "ddp_no_sampler", {"code": 1, "findings": list(findings)})
        return found["found"], found["cause"], found["line"]

    assert verdict(right) == (True, True, True)
    assert verdict(right | {"line": 1}) == (True, True, False)
    assert verdict(right | {"file": "other.py"}) == (True, True, False)
    assert verdict(right | {"cause": "batch_norm"}) == (True, False, False)
    assert verdict(note) == (False, False, False)
    assert verdict() == (False, False, False)
    accused = judged("doctor", "ok_fsdp2", {"code": 1, "findings": [right]})
    assert accused["accused"]
    assert not judged("doctor", "ok_fsdp2", {"code": 0, "findings": [note]})["accused"]

    same, different = {"code": 0, "cause": None}, {"code": 1, "cause": "control-by-rank"}
    unclear = {"code": 2, "cause": "not-deterministic"}
    assert judged("verify", "ok_lora_frozen", different)["accused"]
    assert judged("verify", "ok_lora_frozen", unclear)["unclear"]
    assert not judged("verify", "time_seed", same)["found"]
    assert judged("verify", "time_seed", unclear)["cause"]
    assert not judged("verify", "mixup_flip", unclear)["found"]
    assert judged("verify", "mixup_flip", different)["found"]
    assert not judged("verify", "mixup_flip", different)["cause"]


@pytest.mark.parametrize("tool", TRUTHS)
def test_the_second_set_is_named_whole(tool: str) -> None:
    healthy = {script.stem for script in scripts(tool) if script.stem.startswith("ok_")}
    assert OK_SECOND[tool] < healthy
    assert SECOND[tool] < {script.stem for script in scripts(tool)}


@pytest.mark.parametrize(("tool", "kind"), RESULTS)
def test_the_docs_show_the_rates_that_were_measured(tool: str, kind: str) -> None:
    document = json.loads(RESULTS[tool, kind].read_text())
    every = {script.stem for script in scripts(tool)}
    whole = {"blind": every - SECOND[tool], "second": SECOND[tool], "now": every}[kind]
    assert document["results"].keys() == whole  # none chosen
    assert document["rates"] == parts(document)
    assert table(document) in (ROOT / f"docs/{tool}.md").read_text(), f"python -m tests.corpus.measure table {document}"


def test_a_fault_has_a_kind_and_a_sentence() -> None:
    for fault in (*TRUTHS["verify"].values(), *TRUTHS["doctor"].values()):
        assert isinstance(fault, Fault)
        assert fault.kind
        assert fault.wrong.endswith(".")
