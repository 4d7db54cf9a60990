"""Reads the text of PDF files: the program of a warm process, `child.py MEMORY_BYTES LIFELINE`."""

import encodings
import gc
import logging
import pkgutil
import socket
import sys
from contextlib import suppress
from importlib import import_module
from io import BytesIO

import msgspec
import pypdf
from pypdf import PdfReader, PdfWriter
from pypdf.errors import PyPdfError
from pypdf.generic import DecodedStreamObject, NameObject

from mlx_server.pdf.messages import PdfText, ReadPdf, Refused, Reply
from mlx_server.sandbox.child import Served, end_with_server, enter_sandbox, serve, time_limit


def reply_to(request: ReadPdf) -> tuple[Reply, str]:
    try:
        with time_limit(request.seconds):
            return _extracted(request)
    except MemoryError:
        raise  # the process ends, and the server says so
    except (PyPdfError, RecursionError):
        return Refused("is damaged"), ""
    except Exception as error:  # a damaged file can cause any
        return Refused(f"is damaged ({type(error).__name__})"), ""


def _extracted(request: ReadPdf) -> tuple[Reply, str]:
    reader = PdfReader(BytesIO(_ended(request.data)))
    if reader.is_encrypted and not reader.decrypt(""):
        return Refused("is encrypted"), ""
    pages = len(reader.pages)
    if pages > request.pages:
        return Refused(f"has {pages} pages; the limit is {request.pages}"), ""
    texts, size = list[str](), 0
    for page in reader.pages:
        texts.append(page.extract_text().strip())
        size += len(texts[-1])
        if size > request.characters:
            limit = f"{request.characters:,} characters"
            return Refused(f"has more text than the limit of {limit}"), ""
    if not size:
        return Refused("has no text; scanned pages are not read"), ""
    return PdfText(pages), "\n\n".join(filter(None, texts))


def _ended(data: bytes) -> bytes:
    """The file with an end, where a pointer to the table of objects has to be: without the table,
    pypdf looks for the objects themselves, and without the pointer it gives up."""
    return data if b"startxref" in data else data + b"\nstartxref\n0\n%%EOF\n"


def main() -> None:
    end_with_server(int(sys.argv[2]))
    logging.disable()
    decoder = msgspec.msgpack.Decoder(ReadPdf)

    def answer(frame: bytearray) -> Served:
        reply, text = reply_to(decoder.decode(frame))
        return Served(msgspec.msgpack.encode(reply), text.encode("utf-8", "replace"))

    _warm()
    gc.collect()
    gc.freeze()
    enter_sandbox(int(sys.argv[1]))
    serve(socket.socket(fileno=0), answer)


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
        reply_to(ReadPdf(file.getvalue(), 1, 1, 60))


if __name__ == "__main__":
    main()
