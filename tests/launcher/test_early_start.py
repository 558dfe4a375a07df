"""The first workers of a run start before the launcher has loaded torch; what loads torch pauses the collector."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.launcher.launches import Launches

from paceline.errors import LaunchError
from paceline.launcher import early_start
from paceline.launcher.interrupts import Interrupts
from paceline.launcher.nodes import Nodes
from paceline.launcher.output import Output
from paceline.launcher.plan import Plan
from paceline.launcher.supervise import supervise

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="device files tell on Linux only")


def python(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.conformance
@needs_linux
def test_ranks_start_while_the_launcher_has_no_torch(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own torch is one that waits until the ranks have begun; the ranks' is torch."""
    (launches.directory / "slow").mkdir()
    (launches.directory / "slow" / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import builtins, os, sys, time
        if "RANK" not in os.environ:
            class Wait:
                def find_spec(self, name, path, target=None):
                    if name == "torch":
                        sys.meta_path.remove(self)
                        end = time.monotonic() + 30
                        while not os.path.exists("begun0") or not os.path.exists("begun1"):
                            assert time.monotonic() < end, "no rank began before the launcher had loaded torch"
                            time.sleep(0.02)
            sys.meta_path.insert(0, Wait())
    """)
    )
    launches.environ["PYTHONPATH"] = os.pathsep.join(
        [str(launches.directory / "slow"), launches.environ.get("PYTHONPATH", "")]
    )
    script = launches.script("""
        import os, pathlib
        pathlib.Path("begun" + os.environ["RANK"]).touch()
        import paceline
        run = paceline.start(progress="off")
        run.print(int(run.sum(1)))
    """)
    code, out, err = launches.run("--nproc", "2", script)
    assert (code, out) == (0, "2\n"), err


@needs_linux
@pytest.mark.parametrize(
    ("nodes", "driver", "loaded", "early"),
    [
        (Nodes(), False, False, True),
        (Nodes(), True, False, False),
        (Nodes(), False, True, False),
        (Nodes(min_nodes=2, max_nodes=2, backend="c10d", host="h", port=1, run_id="r"), False, False, False),
    ],
    ids=["one machine", "a driver's device file", "torch is loaded", "two machines"],
)
def test_when_ranks_start_early(
    nodes: Nodes, driver: bool, loaded: bool, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "card0").touch()
    monkeypatch.setattr(early_start, "DRIVERS", (str(tmp_path / ("card*" if driver else "none")),))
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    assert early_start.possible(Plan("script.py", (), 2, {}, nodes=nodes)) == early


def test_what_torch_alone_knows_ends_ranks_that_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One accelerator for two ranks, of which no device file told."""
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("paceline.launcher.supervise.device_count", lambda: 1)
    output = Output(None, frozenset())
    plan = Plan(str(script), (), 2, {})
    early = early_start.start(plan, output, None)
    try:
        with Interrupts() as interrupts, pytest.raises(LaunchError, match="1 device is visible"):
            supervise(plan, interrupts, output, early)
    finally:
        early.processes.stop()
        early.listener.close()
        output.close(failed=False)
    assert early.processes.exits() == {0: -15, 1: -15}


LOADED = """
    import gc, sys
    from paceline.launcher.import_hook import around_import
    from paceline.launcher.torch_import import paused
    around_import("torch", lambda _: paused())
    {before}
    import torch
    print(gc.isenabled(), gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 1000, torch.ones(1).item())
    print(type(torch.__loader__).__name__, torch.__spec__.name, torch.__file__)
"""


@pytest.mark.parametrize("before", ["", "import importlib.util; importlib.util.find_spec('torch')"])
def test_the_collector_leaves_alone_what_torch_has_brought(before: str) -> None:
    first, second = python(LOADED.format(before=before)).splitlines()
    assert first == "True True True 1.0"
    loader, name, file = second.split()
    assert (loader, name) == ("SourceFileLoader", "torch")
    assert Path(file).name == "__init__.py"


def test_a_collector_that_the_script_has_switched_off_stays_so() -> None:
    assert python(LOADED.format(before="gc.disable()")).split()[:2] == ["False", "False"]


@pytest.mark.conformance
def test_a_script_without_torch_is_collected_as_ever(launches: Launches) -> None:
    script = launches.script("import gc\nprint(gc.isenabled(), gc.get_freeze_count())")
    assert launches.run(script)[:2] == (0, "True 0\n")


def test_torch_that_is_not_there_is_missed_as_ever() -> None:
    said = python("""
        import sys
        from paceline.launcher.import_hook import around_import
        from paceline.launcher.torch_import import paused
        around_import("torch", lambda _: paused())
        sys.path[:] = [part for part in sys.path if "site-packages" not in part]
        try:
            import torch
        except ModuleNotFoundError as error:
            print(error.name)
    """)
    assert said == "torch"


@pytest.mark.conformance
def test_objects_of_the_script_are_still_collected(launches: Launches) -> None:
    script = launches.script("""
        import gc, weakref, torch
        class Node: pass
        node = Node()
        node.itself = node
        there = weakref.ref(node)
        del node
        gc.collect()
        print(there())
    """)
    assert launches.run(script)[:2] == (0, "None\n")
