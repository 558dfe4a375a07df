"""`@pytest.mark.ranks(2, 3)`: a test whose body runs in 2 processes at once, one of each rank, and again in 3.

    @pytest.mark.ranks(2, conformance=3, full=4, campaign=5)
    def test_the_sum_is_that_of_all_ranks() -> None: ...

is collected once for each number of processes: `test_...[2ranks]` as it is, `test_...[3ranks]` with the marker
`conformance`, `test_...[4ranks]` with `full`, and so on. `ranks(1)` runs it in pytest's own process, without a process
group.

The ranks are launched once, and the tests of a module that need equally many run one after the other in the same
processes (`Session` in tests/ranks.py). A test passes where its body returns on every rank. Its arguments come from
`parametrize` and from fixtures whose values can be pickled: `tmp_path` is one folder for all ranks. It cannot have a
fixture that acts on pytest's process, as `monkeypatch` and `capfd` do: pytest.MonkeyPatch.context() serves in the body.
Each rank has until the test's `timeout` (pytest-timeout), less a few seconds to tell where it stood.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

ROOT = Path(__file__).resolve().parents[1]
TELLING_SECONDS = 10.0  # of a test's time, for the story of ranks that hang
LONGEST_SECONDS = 3600.0  # where pytest has no deadline
OF_PYTESTS_PROCESS = {
    "caplog", "capfd", "capfdbinary", "capsys", "capsysbinary", "monkeypatch", "pytestconfig", "recwarn", "request",
}  # fmt: skip
SESSION = pytest.StashKey[Any]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    refused = OF_PYTESTS_PROCESS & set(inspect.signature(metafunc.function).parameters)
    sizes = _sizes(metafunc.definition.nodeid, marker)
    if refused and any(size != 1 for size, _ in sizes):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the fixture {min(refused)!r} acts on pytest's process, and the body of a "
            "test marked `ranks` runs in others. Do it in the body, as with pytest.MonkeyPatch.context()."
        )
    params = [pytest.param(size, marks=marks, id="1rank" if size == 1 else f"{size}ranks") for size, marks in sizes]
    metafunc.fixturenames.append("rank_session")
    # of the module's scope, so that pytest puts the tests of equally many ranks beside each other
    metafunc.parametrize("rank_session", params, indirect=True, scope="module")


def _sizes(test: str, marker: pytest.Mark) -> list[tuple[int, tuple[pytest.MarkDecorator, ...]]]:
    found: list[tuple[int, tuple[pytest.MarkDecorator, ...]]] = [(size, ()) for size in marker.args]
    for name, given in marker.kwargs.items():
        if name not in ("conformance", "full", "campaign"):
            raise pytest.UsageError(f"{test}: ranks({name}=...): give 'conformance', 'full' or 'campaign'")
        of_this = given if isinstance(given, tuple) else (given,)
        found += [(size, (getattr(pytest.mark, name),)) for size in of_this]
    sizes = [size for size, _ in found]
    if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) < len(sizes):
        raise pytest.UsageError(f"{test}: ranks needs different numbers of processes from 1 on, and was given {sizes}")
    return found


@pytest.fixture(scope="module")
def rank_session(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The processes of a test that is marked `ranks`; None where pytest's process is the one."""
    if request.param == 1:
        yield None
        return
    from tests.ranks import Session

    session = Session(request.param)
    session.begin()  # here, so that the time is not that of the first test
    yield session
    session.end()
    if session.fault:
        pytest.fail(session.fault, pytrace=False)


@pytest.fixture(autouse=True)
def in_rank_session(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("ranks") is not None:
        request.node.stash[SESSION] = request.getfixturevalue("rank_session")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    session = pyfuncitem.stash.get(SESSION, None)
    if session is None:
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    test = {
        "module": ".".join(pyfuncitem.path.relative_to(ROOT).with_suffix("").parts),
        "pytest_module": pyfuncitem.module.__name__,
        "function": pyfuncitem.originalname,
    }
    arguments = cloudpickle.dumps({name: pyfuncitem.funcargs[name] for name in names})
    try:
        output, skipped = session.run(test, arguments, _deadline(pyfuncitem))
    except AssertionError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    if output:
        pyfuncitem.add_report_section("call", "of all ranks", output)
    if skipped:
        pytest.skip(skipped)
    return True


def _deadline(item: pytest.Function) -> float:
    """Seconds, from the deadline that pytest-timeout holds the test to."""
    marker = item.get_closest_marker("timeout")
    given = marker and (marker.args[0] if marker.args else marker.kwargs.get("timeout"))
    seconds = float(given or item.config.getoption("timeout") or item.config.getini("timeout") or LONGEST_SECONDS)
    return max(seconds - TELLING_SECONDS, seconds / 2)
