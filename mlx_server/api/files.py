"""Files that a client sends within a message: the text of text and PDF files is read; all
others are refused by name."""

import base64
import re
from email.message import Message

from mlx_server import pdf
from mlx_server.api.fields import WireModel
from mlx_server.errors import BadRequest

DATA_URL = re.compile(r"data:([^,]{0,200}?)(;base64)?,(.*)", re.DOTALL)
TEXTUAL = re.compile(
    r"text/.*|application/(?:.*\+)?(?:json|jsonl|ndjson|xml|yaml|x-yaml|toml|javascript|sql)"
)
"""Media types whose content is text."""

PDF, PDF_MARK = "application/pdf", b"%PDF-"

ENCODINGS = {
    "utf-8": "utf-8",
    "utf8": "utf-8",
    "us-ascii": "ascii",
    "iso-8859-1": "latin-1",
    "windows-1252": "cp1252",
    "utf-16": "utf-16",
}
"""The encodings that a file may name. Python has more, but some of them take time quadratic in the
length of the text."""


class FileData(WireModel):
    filename: str | None = None
    file_data: str | None = None
    """A data URL, or the file in base64."""
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
    text = text_of_data(file.file_data, f"{where}.file_data")
    return f"{file.filename}\n{text}" if file.filename else text


def text_of_data(given: str, param: str) -> str:
    """The text of a data URL, or of base64 alone, which is text or a PDF file."""
    parts = DATA_URL.fullmatch(given)
    if parts is None:
        data = _from_base64(given, param)
        return (
            pdf_text(data, param) if data.startswith(PDF_MARK) else _decoded(data, "utf-8", param)
        )
    if not parts[2]:
        raise _no_base64(param)
    header = Message()
    header["content-type"] = parts[1] or "text/plain"
    kind = header.get_content_type()
    if kind == PDF:
        return pdf_text(_from_base64(parts[3], param), param)
    if not TEXTUAL.fullmatch(kind):
        raise BadRequest(
            f"`{param}` has the media type {kind[:64]!r}, which is not supported: these "
            "models read only text. Send the file's text.",
            param=param,
        )
    charset = str(header.get_param("charset", "utf-8")).lower()
    return _decoded(_from_base64(parts[3], param), charset, param)


def pdf_text(data: bytes, param: str) -> str:
    try:
        return pdf.text_of(data)
    except pdf.PdfRefused as refused:
        raise BadRequest(f"The PDF file in `{param}` {refused}.", param=param) from None


def _from_base64(given: str, param: str) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except ValueError:
        raise _no_base64(param) from None


def _decoded(data: bytes, charset: str, param: str) -> str:
    try:
        return data.decode(ENCODINGS[charset]).removeprefix("\ufeff")
    except (ValueError, KeyError):  # of the text, of the name of its encoding
        raise BadRequest(
            f"`{param}` is not text in its encoding (UTF-8 if it names none), nor a PDF file.",
            param=param,
        ) from None


def _no_base64(param: str) -> BadRequest:
    return BadRequest(
        f"`{param}` should be base64, alone or in a data URL, such as "
        "`data:text/plain;base64,SGk=`.",
        param=param,
    )
