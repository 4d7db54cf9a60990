"""Files that a client sends within a message: text is read, everything else is refused by name."""

import base64
import re
from email.message import Message

from mlx_server.api.fields import WireModel
from mlx_server.errors import BadRequest

DATA_URL = re.compile(r"data:([^,]{0,200}?)(;base64)?,(.*)", re.DOTALL)
TEXTUAL = re.compile(
    r"text/.*|application/(?:.*\+)?(?:json|jsonl|ndjson|xml|yaml|x-yaml|toml|javascript|sql)"
)
"""Media types whose content is text."""

ENCODINGS = {
    "utf-8": "utf-8",
    "utf8": "utf-8",
    "us-ascii": "ascii",
    "iso-8859-1": "latin-1",
    "windows-1252": "cp1252",
    "utf-16": "utf-16",
}
"""Not all that Python has: some take time quadratic in the length of the text."""


class FileData(WireModel):
    filename: str | None = None
    file_data: str | None = None
    """A data URL."""
    file_id: str | None = None
    file_url: str | None = None


def file_text(file: FileData, where: str) -> str:
    """The file's name and its text. Raises BadRequest for a file that is not text in full."""
    for name in ("file_id", "file_url"):
        if getattr(file, name):
            raise BadRequest(
                f"`{where}.{name}` is not supported: this server keeps no files and fetches none. "
                "Send the text in `file_data`.",
                param=f"{where}.{name}",
            )
    if file.file_data is None:
        raise BadRequest(f"`{where}.file_data` is missing.", param=f"{where}.file_data")
    text = _text_of_url(file.file_data, f"{where}.file_data")
    return f"{file.filename}\n{text}" if file.filename else text


def _text_of_url(url: str, param: str) -> str:
    parts = DATA_URL.fullmatch(url)
    if parts is None or not parts[2]:
        raise BadRequest(
            f"`{param}` should be a data URL in base64, such as `data:text/plain;base64,SGk=`.",
            param=param,
        )
    header = Message()
    header["content-type"] = parts[1] or "text/plain"
    kind = header.get_content_type()
    if not TEXTUAL.fullmatch(kind):
        raise BadRequest(
            f"`{param}` has the media type {kind[:64]!r}, which is not supported: these "
            "models read only text. Send the file's text.",
            param=param,
        )
    try:
        charset = ENCODINGS[str(header.get_param("charset", "utf-8")).lower()]
        return base64.b64decode(parts[3], validate=True).decode(charset).removeprefix("\ufeff")
    except (ValueError, KeyError):  # of base64, of the text, of the name of its encoding
        raise BadRequest(
            f"`{param}` is not valid base64 of text in its encoding (UTF-8 if it names none).",
            param=param,
        ) from None
