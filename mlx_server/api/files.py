"""Files that a client sends within a message: the text of text and PDF files is read, and a line
takes the place of all others."""

import base64
import re
from email.message import Message

from mlx_server import pdf
from mlx_server.api import media
from mlx_server.api.fields import Text, WireModel
from mlx_server.messages import ContentPart, Media

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


NO_DATA = "this server keeps no files and fetches none"
NO_BASE64 = "its data is not base64"


class UnreadableFile(Exception):
    """The file has no text that can be read; the message says why."""


class FileData(WireModel):
    filename: Text = None
    file_data: Text = None
    """A data URL, or the file in base64."""
    file_id: Text = None
    file_url: Text = None


def content_of_file(file: FileData, place: str) -> ContentPart:
    """The file's name and its text; a picture or a sound is a medium of its own kind."""
    if file.file_data is None:
        where = " ".join(filter(None, (file.filename, file.file_url, file.file_id)))
        return Media("file", place, where[: media.URL_CHARACTERS], why=NO_DATA)
    return content_of_data(file.file_data, place, file.filename)


def content_of_data(given: str, place: str, name: str | None = None) -> ContentPart:
    """The text of a data URL, or of base64 alone, which is text or a PDF file."""
    media_type = re.split("[;,]", given[5:200])[0] if given[:5] == "data:" else ""
    kind = media.kind_of(media_type.partition("/")[0])
    if kind:
        return media.of_url(kind, given, place)
    try:
        text = text_of_data(given)
    except UnreadableFile as refused:
        known = " ".join(filter(None, (name, media_type)))
        return Media("file", place, known[: media.URL_CHARACTERS], why=str(refused))
    return f"{name}\n{text}" if name else text


def text_of_data(given: str) -> str:
    parts = DATA_URL.fullmatch(given)
    if parts is None:
        data = _from_base64(given)
        return pdf_text(data) if data.startswith(PDF_MARK) else _decoded(data, "utf-8")
    if not parts[2]:
        raise UnreadableFile(NO_BASE64)
    header = Message()
    header["content-type"] = parts[1] or "text/plain"
    kind = header.get_content_type()
    if kind == PDF:
        return pdf_text(_from_base64(parts[3]))
    if not TEXTUAL.fullmatch(kind):
        raise UnreadableFile("it is neither text nor PDF")
    charset = str(header.get_param("charset", "utf-8")).lower()
    return _decoded(_from_base64(parts[3]), charset)


def pdf_text(data: bytes) -> str:
    try:
        return pdf.text_of(data)
    except pdf.PdfRefused as refused:
        raise UnreadableFile(f"the PDF file {refused}") from None


def _from_base64(given: str) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except ValueError:
        raise UnreadableFile(NO_BASE64) from None


def _decoded(data: bytes, charset: str) -> str:
    try:
        return data.decode(ENCODINGS[charset]).removeprefix("\ufeff")
    except (ValueError, KeyError):  # of the text, of the name of its encoding
        raise UnreadableFile("it is not text in its encoding, nor a PDF file") from None
