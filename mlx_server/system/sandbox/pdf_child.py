"""Reads the text of PDF files: the program of a warm process, `child.py MEMORY_BYTES LIFELINE`."""

import encodings
import logging
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

import pypdf
from pypdf import PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject, NameObject

from mlx_server.system.sandbox.files import FileRefused, FileReply, ReadPdf, run_reader


def read_pdf(request: ReadPdf) -> tuple[FileReply, bytes]:
    reader = PdfReader(BytesIO(_ended(request.data)))
    if reader.is_encrypted and not reader.decrypt(""):
        raise FileRefused("is encrypted")
    pages = len(reader.pages)
    if pages > request.pages:
        raise FileRefused(f"has {pages} pages; the limit is {request.pages}")
    texts, size, forms = list[str](), 0, _Forms(request.characters)
    known: dict[str, str] = {}
    for page in reader.pages:
        # pages may share their content, and are read once then
        drawn = repr([page.raw_get(key) for key in ("/Contents", "/Resources") if key in page])
        # pypdf calls it for each drawing of a form, on the page's own object
        read = partial(forms.text_of, page.extract_xform_text)
        page.extract_xform_text = read  # type: ignore[method-assign]
        if drawn not in known:
            known[drawn] = page.extract_text().strip()
        texts.append(known[drawn])
        size += len(texts[-1])
        if forms.are_too_deep:
            raise FileRefused(f"has forms within more than {MOST_FORMS} others")
        if size > request.characters or forms.have_too_much:
            limit = f"{request.characters:,} characters"
            raise FileRefused(f"has more text than the limit of {limit}")
    if not size:
        raise FileRefused("has no text; scanned pages are not read")
    return FileReply(), "\n\n".join(filter(None, texts)).encode("utf-8", "replace")


MOST_FORMS = 32
"""The forms that may be drawn within each other."""


class _Forms:
    """The texts of a file's forms, each of which is read once, however often it is drawn: forms
    that draw each other would take a time that doubles with each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._read: dict[int, tuple[object, str]] = {}
        """By identity; the form is kept, so that no other one gets its identity."""
        self._depth = 0
        self.have_too_much = self.are_too_deep = False

    def text_of(self, read: Callable[..., str], form: object, *given: Any, **more: Any) -> str:
        if id(form) not in self._read:
            self._read[id(form)] = form, ""  # within itself it adds nothing
            self._depth += 1
            self.are_too_deep |= self._depth > MOST_FORMS
            text = "" if self.are_too_deep else read(form, *given, **more)
            self._depth -= 1
            if len(text) > self._most:
                self.have_too_much, text = True, ""
            self._read[id(form)] = form, text
        return self._read[id(form)][1]


def _ended(data: bytes) -> bytes:
    """The file with an end, where a pointer to the table of objects has to be: without the table,
    pypdf looks for the objects themselves, and without the pointer it gives up."""
    return data if b"startxref" in data else data + b"\nstartxref\n0\n%%EOF\n"


def _warm() -> None:
    """Imports what is imported late: nothing can be opened afterwards."""
    for package in (pypdf, encodings):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):
                import_module(module.name)
    for encrypted in (False, True):
        writer, file = PdfWriter(), BytesIO()
        words = DecodedStreamObject()
        words.set_data(b"BT (x) Tj ET")
        page = writer.add_blank_page(100, 100)
        page[NameObject("/Contents")] = writer._add_object(words.flate_encode())
        if encrypted:
            writer.encrypt("", algorithm="AES-256")
        writer.write(file)
        with suppress(FileRefused):  # no font is named, so that no text is seen
            read_pdf(ReadPdf(file.getvalue(), 1, 1, 60))


if __name__ == "__main__":
    logging.disable()
    run_reader(ReadPdf, read_pdf, _warm)
