"""Wheel and sdist, each built and installed into an empty environment, hold what the source does, and run there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT = ("pyproject.toml", "README.md", "LICENSE", "src/paceline")  # all that a build may need


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy of the source: a build leaves files beside it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    code = "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"
    run(sys.executable, "-c", code, cwd=tree)
    return tree / "dist"


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_it_installs_into_an_empty_environment_and_runs(kind: str, built: Path, tmp_path: Path) -> None:
    (package,) = built.glob(f"*.{kind}")
    assert package.name.startswith(f"paceline-{PROJECT['version']}")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # What it depends on, and setuptools, come from here; its own folder comes first, and no editable install counts.
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "others.pth").write_text("\n".join(others))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    run(*pip, "--no-build-isolation", "--ignore-installed", package, cwd=tmp_path)

    installed = site / "paceline"
    assert files(installed) == files(SOURCE)
    assert (installed / "py.typed").is_file()
    (info,) = site.glob("paceline-*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert f"Requires-Python: {PROJECT['requires-python']}" in metadata
    assert any("LICENSE" in name for name in files(info))
    version = run(tmp_path / "env" / "bin" / "paceline", "--version", cwd=tmp_path)
    assert PROJECT["version"] in version
    code = "import paceline, paceline.run; print(paceline.__file__, paceline.__version__, paceline.start.__name__)"
    assert run(python, "-c", code, cwd=tmp_path).split() == [
        str(installed / "__init__.py"),
        PROJECT["version"],
        "start",
    ]


def test_the_version_stands_in_one_place() -> None:
    """CITATION.cff repeats it, for who reads that file alone (tests/test_repository.py)."""
    named = [
        path.relative_to(ROOT)
        for path in [*SOURCE.rglob("*.py"), ROOT / "README.md", ROOT / "mkdocs.yml"]
        if re.search(rf"\b{re.escape(PROJECT['version'])}\b", path.read_text())
    ]
    assert not named
