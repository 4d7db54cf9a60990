"""The standard streams of a command, which may be closed, full or a terminal."""

import io
import os
import re
import sys

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a terminal would obey; tab and line feed are left in."""

USERINFO = re.compile(r"(?<=//)[^/\s]*@")
"""The user and the password of a URL."""


def prepare_streams() -> None:
    """Opens streams that are closed, since a file that is opened later would get their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def discard_output() -> None:
    """Drops what could not be written, so that the end of the process does not try again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def safe(text: str) -> str:
    """The text without control characters, and without the passwords of its URLs."""
    return USERINFO.sub("", CONTROL.sub("", text))


def words_of(error: OSError) -> str:
    place = f"{os.fsdecode(error.filename)!r}" if error.filename else "The output or a file"
    return (
        f"{place} can't be read or written: {error.strerror or error}. Check the path, its "
        "permissions and the free space on its disk."
    )
