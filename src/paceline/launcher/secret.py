"""The secret that the launchers of several machines share: a file of its own. No torch."""

from __future__ import annotations

import itertools
import os
import secrets
import stat

from paceline.config import open_plain
from paceline.errors import LaunchError

MIN_CHARACTERS = 32
MIN_DIFFERENT = 6  # characters, and steps from one to the next; 32 random hexadecimal digits have 14 and more
_MOST_BYTES = 4096
_BYTES = 32
_MAKE = "`paceline secret FILE`"


def make_secret() -> str:
    """A new one: 32 random bytes, as hexadecimal digits."""
    return secrets.token_hex(_BYTES)


def write_secret(path: str) -> None:
    """Write a new secret into a new file, which this user alone can read. Raises LaunchError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise LaunchError(
            f"{path} exists, and a secret that is in use is not overwritten. Use it, or remove it first."
        ) from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}. Name a file in a folder of your own.") from None
    with open(descriptor, "w") as file:
        file.write(make_secret() + "\n")


def read_secret(path: str) -> str:
    """The secret in a file. Raises LaunchError where others could read it too, or it can be guessed."""
    option = f"--rdzv-secret-file {path}"
    try:
        with open_plain(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MOST_BYTES + 1)
        text = data.decode().strip()
    except FileNotFoundError:
        raise LaunchError(
            f"{option}: there is no such file. Make it once (`paceline secret {path}`), and copy it to all machines, "
            "or put it on a disk that they share."
        ) from None
    except OSError as error:
        raise LaunchError(f"{option} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{option} is no text. Make one with `paceline secret FILE`.") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LaunchError(
            f"{option}: other users can read or write it (its mode is {stat.S_IMODE(mode):o}). If nobody has, "
            f"`chmod 600 {path}`; else make a new one."
        )
    if len(text) < MIN_CHARACTERS:
        raise LaunchError(
            f"{option} has {len(text)} characters, which can be guessed; {MIN_CHARACTERS} are the least. Make one with "
            "`paceline secret FILE`."
        )
    if len(data) > _MOST_BYTES:
        raise LaunchError(f"{option} is no secret: it has more than {_MOST_BYTES} bytes. Make one with {_MAKE}.")
    if not text.isprintable():
        raise LaunchError(f"{option} has characters that are no text. Make one with {_MAKE}.")
    if can_be_guessed(text):
        raise LaunchError(
            f"{option} can be guessed: it repeats itself, or counts, or has few different characters. Make one with "
            f"{_MAKE}."
        )
    return text


def can_be_guessed(text: str) -> bool:
    """Does it repeat itself, or count up or down, or have few different characters?"""
    steps = {ord(after) - ord(before) for before, after in itertools.pairwise(text)}
    repeats = text in (text + text)[1:-1]
    return repeats or min(len(set(text)), len(steps)) < MIN_DIFFERENT
