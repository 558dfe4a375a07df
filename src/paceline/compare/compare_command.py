"""paceline compare: run the same script under each strategy for a few steps, and print one table.

1. Check everything that can be checked before anything starts: the script, the names, the numbers.
2. Run trials in rounds (rounds.py). A case that fails is not tried again, and the others continue. A signal ends the
   rounds, and the results so far are shown.
3. Print the table, the reasons of failed cases, and a sentence that recommends a strategy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from paceline.compare import cases as of
from paceline.compare.cases import Case, CompareOptions
from paceline.compare.document import make_document
from paceline.compare.rounds import check_cases, run_rounds
from paceline.compare.table import render_table
from paceline.errors import SettingError, printable
from paceline.launcher.checks import device_count
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import say
from paceline.launcher.plan import available_cores, count_processes
from paceline.trials.json_file import check_writable, write_json
from paceline.trials.start import Length, replica_devices
from paceline.trials.trial import check_script

LEAST_STEPS = 3


def compare(options: CompareOptions) -> int:
    """Print the table and write the files.

    Returns the exit code: 0; 1 if nothing ran or a file could not be written; 128 + n for signal n.

    Raises:
        LaunchError, SettingError: the command cannot work.
    """
    length = _length(options)
    check_script(options.script)  # the cheapest check first
    nproc = count_processes(options.nproc, available_cores(), device_count)
    asked = _cases(options, nproc)
    check_cases(options.script, asked, length, named=options.strategies is not None)
    for path in filter(None, (options.json_file, options.html_file)):
        check_writable(path)
    if options.html_file is not None:
        _check_plotly()
    with Interrupts() as interrupts:
        try:
            rows = run_rounds(options, asked, length, interrupts)
        except Stopped as stopped:
            return stopped.report()
    measured = any(row.figures is not None for row in rows)
    stopped_by = interrupts.due
    written = not (measured or stopped_by is None) or _show(options, make_document(options, nproc, length, rows))
    if stopped_by is not None:
        return Stopped(stopped_by).report()
    return 0 if measured and written else 1


def _show(options: CompareOptions, document: dict[str, Any]) -> bool:
    """Print the table and write the files. Report each file that cannot be written. Returns False if there is one."""
    sys.stdout.write("\n" + printable(render_table(document["rows"])))
    sentence = document["verdict"]["sentence"] if document["verdict"] is not None else document["no_verdict"]
    if sentence is not None:
        sys.stdout.write(f"\n{sentence}\n")
    sys.stdout.flush()
    written = True
    for path, write in ((options.json_file, write_json), (options.html_file, _write_page)):
        if path is None:
            continue
        try:
            write(path, document)
        except Exception as error:  # the table is already printed, and the other file is still written
            written = False
            say(f"paceline compare: cannot write {path}: {type(error).__name__}: {error}\n")
    return written


def _check_plotly() -> None:
    try:
        for name in ("plotly", "plotly.io", "plotly.subplots"):
            import_module(name)
    except ImportError as error:
        if error.name == "plotly":
            raise SettingError("--html needs plotly, which is not installed: pip install 'paceline[compare]'") from None
        raise SettingError(
            f"--html needs plotly, but importing it fails ({error}): pip install --upgrade 'paceline[compare]'"
        ) from error


def _write_page(path: str, document: Any) -> None:
    from paceline.compare.html_page import render_page

    page = render_page(document)
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)


def _length(options: CompareOptions) -> Length:
    for name, value, least in (("--steps", options.steps, LEAST_STEPS), ("--rounds", options.rounds, 1)):
        if value < least:
            raise SettingError(f"{name} {value}: give at least {least}.")
    if options.deadline <= 0:
        raise SettingError(f"--deadline {options.deadline:g}: give a number of seconds above 0, such as 300.")
    return Length(options.steps, max(1, min(5, options.steps // 4)), options.deadline)


def _cases(options: CompareOptions, nproc: int) -> list[Case]:
    return of.make_cases(
        of.read_strategies(options.strategies, nproc),
        of.read_precisions(options.precision),
        of.read_batches(options.global_batch),
        nproc,
        replica_devices(str(options.script.settings.get("device") or ""), nproc, device_count),
    )
