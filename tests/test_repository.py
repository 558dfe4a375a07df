"""The files that a hosting service reads say what is there: they are read by nobody until something is wrong."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_is_there(path: Path) -> None:
    workflow = read(path)
    assert set(workflow) >= {"name", "permissions", "jobs"}
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML reads `on` so
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert job["timeout-minutes"] <= 120, f"{name}: nothing may hang for long"
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")), step
        for target in re.findall(r"\bmake ([a-z]+)", step.get("run", "")):
            assert target in targets(), f"the Makefile has no {target}"
        for script in re.findall(r"(?:^|\s)(\.\S+/\S+)", step.get("run", "")):
            assert os.access(ROOT / script, os.X_OK), f"{script} cannot be run"


def test_the_workflow_runs_all_that_a_change_must_pass_and_the_oldest_and_newest_versions() -> None:
    (workflow,) = map(read, WORKFLOWS)
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert ".ci/run" in commands
    assert any(command.startswith("make compat") for command in commands)
    compat = workflow["jobs"]["compat"]["strategy"]["matrix"]["include"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert [(one["versions"], one["python"]) for one in compat] == [("oldest", pythons[0]), ("newest", pythons[-1])]
    assert PROJECT["requires-python"] == f">={pythons[0]}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_for_versions_and_the_doctor(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in FIELDS
        assert field["attributes"]["label" if field["type"] != "markdown" else "value"]
        assert field["type"] != "dropdown" or field["attributes"]["options"]
    assert {"paceline env", "paceline doctor"} <= set(re.findall(r"paceline \w+", path.read_text()))


def test_hooks_before_a_commit_are_those_of_make_lint() -> None:
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert all({"id", "name", "entry", "language"} <= set(hook) for hook in hooks)
    tools = {hook["entry"].split()[0].rpartition("/")[2] for hook in hooks}
    makefile = (ROOT / "Makefile").read_text()
    assert tools == {"ruff", "mypy"}
    assert all(f"$(BIN)/{tool}" in makefile for tool in tools)


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["title"], citation["version"]) == ("Paceline", PROJECT["version"])
    assert citation["license"] == PROJECT["license"]


def test_other_yaml_can_be_read() -> None:
    assert read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") is not None
    assert "paceline doctor" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()


@pytest.mark.parametrize("name", ["RELEASING.md", "SECURITY.md", ".github/pull_request_template.md", "CONTRIBUTING.md"])
def test_commands_in_the_documents_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"`make ([a-z]+)", text):
        assert target in targets(), f"{name}: the Makefile has no {target}"
    for path in re.findall(r"`((?:tests|examples|docs|benchmarks)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), f"{name}: there is no {path}"


def test_no_environment_of_the_compatibility_tests_is_committed() -> None:
    assert "build/" in (ROOT / ".gitignore").read_text().splitlines()


def would_run(*words: str) -> str:
    """The commands of `make ...` in an environment that is not there yet."""
    command = ["make", "--dry-run", "--always-make", "VENV=build/not-there", *words]
    handed_down = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "VENV", "EDITABLE", "PART")  # by a make around this one
    environ = {name: value for name, value in os.environ.items() if name not in handed_down}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_make_links_the_source_and_for_ci_it_installs_the_wheel() -> None:
    assert "--no-build-isolation -e '.[dev]'" in would_run("test")
    for target in ("test", "conformance", "test-system"):
        installs = re.findall(r"--no-build-isolation (.*)'\.\[", would_run(target, "EDITABLE="))
        assert installs, target
        assert set(installs) == {" "}, target


def test_conformance_is_whole_and_ci_runs_a_part_of_it() -> None:
    assert '-m "(conformance or full) and not campaign"' in would_run("conformance")
    assert '-m "(conformance or full) and not campaign and not full"' in would_run("conformance", "PART=ci")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        would_run("conformance", "PART=half")
    assert "PART=half: there is no such part. Give PART=ci" in refused.value.stderr


# In place of the Makefile: each run of pytest has a closing line, and one imports a module from src or from elsewhere.
TARGETS = """
lint:
	@echo all is well
test conformance:
	@echo "== 2 passed, 1 skipped in 1.50s =="
test-system:
	@PYTHONPATH=$${FOUND:-other} python3 -c "import paceline" && echo "== 1 failed, 4 passed in 2.00s =="
"""


@pytest.mark.parametrize("found", ["other", "src"])
def test_ci_sums_its_runs_and_fails_where_the_source_is_imported(found: str, tmp_path: Path) -> None:
    for folder in ("bin", ".ci", "src/paceline", "other/paceline"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("src", "other"):
        (tmp_path / folder / "paceline" / "__init__.py").touch()
    for program in ("sbatch", "munged", "mpirun", "sshd", "ssh", "ip", "g++"):  # so that nothing is installed
        (tmp_path / "bin" / program).touch(0o755)
    (tmp_path / "bin" / "sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tmp_path / "bin" / "sudo").chmod(0o755)
    (tmp_path / "Makefile").write_text(TARGETS)
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FOUND": found}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1].strip("= ") == "1 failed, 8 passed, 2 skipped in 5.00s", done.stdout
    told = "make test-system: a process imported Paceline from src, and not from the wheel"
    assert (told in done.stdout) == (found == "src"), done.stdout
    assert done.returncode == (found == "src"), done.stdout
