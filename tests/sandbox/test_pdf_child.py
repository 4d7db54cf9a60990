"""What a PDF file's text is, in the process that reads it."""

from typing import Any

import pytest
from pypdf import PageObject

from mlx_server.system.sandbox.files import FileReply, ReadPdf, read_safely
from mlx_server.system.sandbox.pdf_child import read_pdf
from tests.sandbox.pdf_files import locked, pdf, sharing


def read(data: bytes, pages: int = 10, characters: int = 1000) -> tuple[FileReply, bytes]:
    return read_safely(read_pdf, ReadPdf(data, pages, characters, 60))


def test_content_that_pages_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[str]()
    extract = PageObject.extract_text

    def counted(page: PageObject, *given: Any, **more: Any) -> str:
        parsed.append(extract(page, *given, **more))
        return parsed[-1]

    monkeypatch.setattr(PageObject, "extract_text", counted)
    assert read(sharing(9, b"BT /F1 1 Tf (x) Tj ET")) == (FileReply(), b"\n\n".join([b"x"] * 9))
    assert len(parsed) == 1
    refused = FileReply(refusal="has more text than the limit of 8 characters")
    assert read(sharing(9, b"BT /F1 1 Tf (x) Tj ET"), characters=8) == (refused, b"")


def test_a_password_is_asked_for_only_if_there_is_one() -> None:
    assert read(locked(pdf("Hello"), "")) == (FileReply(), b"Hello")
    assert read(locked(pdf("Hello"), "hush")) == (FileReply(refusal="is encrypted"), b"")


@pytest.mark.parametrize("size", [0, 1, 8, 100, 300])
def test_a_file_that_was_cut_is_damaged_or_has_its_text(size: int) -> None:
    reply, text = read(pdf("Hello")[:size])
    assert reply.refusal.startswith("is damaged")
    assert text == b""


def test_only_memory_that_runs_out_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError("secret"), RecursionError(), AssertionError()):

        def fail(data: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("mlx_server.system.sandbox.pdf_child.PdfReader", fail)
        reply, _ = read(b"")
        assert reply.refusal.startswith("is damaged")
        assert "secret" not in reply.refusal

    def exhausted(data: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mlx_server.system.sandbox.pdf_child.PdfReader", exhausted)
    with pytest.raises(MemoryError):
        read(b"")
