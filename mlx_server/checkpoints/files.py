"""Reads a checkpoint's small files, and says what a file is that only has the name of one: a failed
download leaves others in its place.

The sentences continue one that begins with the file's name, and lack the full stop.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from mlx_server.errors import ModelUnusable, public_message
from mlx_server.system.files import read_regular

BYTES = 128
"""The bytes of a file's beginning that are looked at."""

BOM = b"\xef\xbb\xbf"

AGAIN = "Download it again"

LFS = "is a Git LFS pointer, not the file itself. Run `git lfs pull` in the folder of the clone"
PAGE = (
    "is a web page, not the file itself. Download it again; if it is gated, accept its terms and "
    "run `hf auth login` first"
)
GGUF = (
    "is a GGUF file. Use a checkpoint in safetensors, or convert the original model with "
    "`mlx_lm.convert`"
)
PICKLE = (
    "is a PyTorch file, which is never opened because such files can run code. Use a checkpoint in "
    "safetensors, or convert the original model with `mlx_lm.convert`"
)

KINDS = (
    (re.compile(rb"version https://git-lfs"), LFS),
    (re.compile(rb"(?i)\s*<(?:!doctype\s+html|html|head|body|!--)"), PAGE),
    (re.compile(rb"\s*<(?:\?xml|[Ee]rror)"), f"is an error that a server sent as XML. {AGAIN}"),
    (re.compile(rb"GGUF"), GGUF),
    (re.compile(rb"\xff\xfe|\xfe\xff"), "is UTF-16 text. Save it as UTF-8"),
    (re.compile(rb"PK\x03\x04|\x80[\x02-\x05]"), PICKLE),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf"), "is an archive. Unpack it"),
    (re.compile(rb"\0+\Z"), f"begins with zeros: its download was not finished. {AGAIN}"),
    (re.compile(rb"\Z"), f"is empty. {AGAIN}"),
)
"""Each kind, by its beginning."""

TEXT = re.compile(rb"[\t\n\r -~]+\Z")


def other_kind(begin: bytes) -> str | None:
    """What a file with this beginning is, and what to do; None if it may be a model's file."""
    begin = begin.removeprefix(BOM)[:BYTES]
    return next((what for pattern, what in KINDS if pattern.match(begin)), None)


def other_than_weights(begin: bytes) -> str | None:
    """Like `other_kind`, for a file that is not text."""
    if (what := other_kind(begin)) or not TEXT.match(begin[:BYTES]):
        return what
    quoted = begin[:BYTES].decode().strip().split("\n")[0][:60]
    return f"is text that begins with {quoted!r}. {AGAIN}"


def read_own(path: Path) -> bytes:
    """The content of a model's file. Raises ModelUnusable if it is something else, or OSError."""
    content = read_regular(path)
    if what := other_kind(content[: BYTES + len(BOM)]):
        raise ModelUnusable(f"{path.name} {what}.")
    return content


log = logging.getLogger("mlx_server.families")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, with or without a byte order mark. Raises ModelUnusable."""
    try:
        found = json.loads(read_own(existing(path)), object_pairs_hook=_made)
    except OSError as error:
        raise ModelUnusable(f"{path.name} can't be read: {public_message(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path.name} is not valid JSON: {error}. {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ModelUnusable(f"{path.name} must contain a JSON object. {AGAIN}.")
    return found


def _made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object as `json` does, but in Python, where other threads get their turn."""
    return dict(pairs)


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json`; empty if there is no such file, or with a warning if it is damaged."""
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ModelUnusable as error:
        folder = path.parent.name
        log.warning("%s The model in %r is used without this file.", error.message, folder)
        return {}


def existing(path: Path) -> Path:
    """The path of a file. Raises ModelUnusable if there is none."""
    if not path.is_file():
        raise ModelUnusable(
            f"{path.name} is missing from the model's folder {path.parent.name!r}. "
            "Download the model again, or convert it with `mlx_lm.convert`."
        )
    return path
