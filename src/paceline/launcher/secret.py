"""The file with the secret that the launchers of several machines share. Does not import torch."""

from __future__ import annotations

import itertools
import os
import secrets
import stat

from paceline.config import open_plain
from paceline.errors import LaunchError

MIN_CHARACTERS = 32
MIN_DIFFERENT = 6  # distinct characters, and distinct steps between them; 32 random hex digits have about 14 or more
_MOST_BYTES = 4096
_BYTES = 32
_MAKE = "`paceline secret FILE`"


def make_secret() -> str:
    """Make a new secret: 32 random bytes, as hexadecimal digits."""
    return secrets.token_hex(_BYTES)


def write_secret(path: str) -> None:
    """Write a new secret to a new file that only this user can read. Raises LaunchError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise LaunchError(
            f"{path} exists and may be in use, so it is not overwritten. Use it, or remove it first."
        ) from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}. Choose a writable directory.") from None
    with open(descriptor, "w") as file:
        file.write(make_secret() + "\n")


def read_secret(path: str) -> str:
    """Read a secret. Raises LaunchError if other users can read the file, or if the secret can be guessed."""
    option = f"--rdzv-secret-file {path}"
    try:
        with open_plain(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MOST_BYTES + 1)
        text = data.decode().strip()
    except FileNotFoundError:
        raise LaunchError(
            f"{option}: no such file. Make it once (`paceline secret {path}`), and copy it to all machines or to a "
            "shared disk."
        ) from None
    except OSError as error:
        raise LaunchError(f"{option} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{option} is not text. Make one with {_MAKE}.") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LaunchError(
            f"{option}: other users can read or write it (its mode is {stat.S_IMODE(mode):o}). Run `chmod 600 {path}`, "
            "or make a new secret if someone may have read it."
        )
    if len(text) < MIN_CHARACTERS:
        raise LaunchError(
            f"{option} has only {len(text)} characters, so it can be guessed; at least {MIN_CHARACTERS} are needed. "
            f"Make one with {_MAKE}."
        )
    if len(data) > _MOST_BYTES:
        raise LaunchError(f"{option} is not a secret: it has more than {_MOST_BYTES} bytes. Make one with {_MAKE}.")
    if not text.isprintable():
        raise LaunchError(f"{option} has unprintable characters. Make one with {_MAKE}.")
    if can_be_guessed(text):
        raise LaunchError(
            f"{option} can be guessed: it repeats itself, counts up or down, or has few different characters. Make one "
            f"with {_MAKE}."
        )
    return text


def can_be_guessed(text: str) -> bool:
    """Return whether the text repeats itself, counts up or down, or has few different characters."""
    steps = {ord(after) - ord(before) for before, after in itertools.pairwise(text)}
    repeats = text in (text + text)[1:-1]
    return repeats or min(len(set(text)), len(steps)) < MIN_DIFFERENT
