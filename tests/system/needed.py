"""What these tests need of the machine. They fail where it is missing: `make test-system` skips nothing."""

from __future__ import annotations

import os
import shutil

import pytest

PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def need(packages: str, *programs: str) -> None:
    """Fail with what to install unless all programs are there, and this is root."""
    missing = [name for name in programs if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.fail(f"no {', '.join(missing)} here. On Debian and Ubuntu: apt-get install {packages}", pytrace=False)
    if os.geteuid() != 0:
        pytest.fail("the system tests start daemons, and need root: sudo make test-system", pytrace=False)
