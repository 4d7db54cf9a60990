"""The text of PDF files, and files that are made to harm their reader."""

from typing import Any

import pytest
from pypdf import PageObject

from mlx_server import limits
from mlx_server.system.sandbox.files import (
    PDF_PROCESSES,
    FileRefused,
    FileReply,
    ReadPdf,
    pdf_text,
    read_safely,
)
from mlx_server.system.sandbox.pdf_child import read_pdf
from tests.sandbox.pdf_files import assembled, bomb, composite, locked, pdf, sharing, with_forms
from tests.tables import cases


def refusal(data: bytes) -> str:
    with pytest.raises(FileRefused) as refused:
        pdf_text(data)
    return str(refused.value)


def test_the_text_of_all_pages_is_read() -> None:
    assert pdf_text(pdf("Hello", "World")) == "Hello\n\nWorld"


@cases
def test_characters_of_all_codecs_are_read(codec: str, cmap: str) -> None:
    """The process that reads can import nothing any more."""
    assert pdf_text(composite("日本".encode(codec), cmap)) == "日本"


def test_scanned_pages_have_no_text() -> None:
    assert "no text" in refusal(pdf(b""))


def test_a_file_without_a_table_of_its_objects_is_read() -> None:
    assert pdf_text(pdf("Hello").rpartition(b"xref\n0")[0] + b"trailer<</Root 1 0 R>>") == "Hello"


@pytest.mark.parametrize(
    ("drawn", "times"),
    [
        ([[]], 1),
        ([[1, 1], [2], []], 5),
        ([[0, 0]], 1),
        ([[1, 1], [0, 1]], 3),
        ([*([n + 1, n + 1] for n in range(16)), []], (1 << 17) - 1),
    ],
    ids=["one", "three", "itself", "each other", "doubled"],
)
def test_a_form_is_read_once_however_often_it_is_drawn(drawn: list[list[int]], times: int) -> None:
    assert pdf_text(with_forms(*drawn)).count("x") == times


@pytest.mark.slow
def test_forms_within_forms_have_limits() -> None:
    assert "more text" in refusal(with_forms(*([n + 1] * 9 for n in range(20)), []))
    assert "within more than" in refusal(with_forms(*([n + 1] for n in range(100)), []))


LOOP = assembled([b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[2 0 R]/Count 1>>"])
NESTED = assembled(
    [
        b"<</Type/Catalog/Pages 2 0 R>>",
        *(b"<</Type/Pages/Kids[%d 0 R]/Count 1>>" % (n + 3) for n in range(5000)),
    ]
)


@pytest.mark.parametrize(
    "data",
    [
        b"%PDF-",
        b"%PDF-1.7\n" + b"\0" * 10_000,
        pdf("Hello")[:200],
        LOOP,
        NESTED,
        assembled([b"<</Type/Catalog/Pages 2 0 R>>", b"[" * 100_000]),
        pdf(b"[" * 100_000),
        pdf(b"BT (x" + b"(" * 100_000),
        pdf(b"\xff" * 1000, filters="/Filter/FlateDecode"),
        pdf(b"x", filters="/Filter[" + "/ASCIIHexDecode" * 1000 + "]"),
        bomb(1 << 30),
    ],
    ids=[
        *("head", "zeros", "cut", "loop", "nested", "brackets", "content", "text", "noise"),
        *("filters", "bomb"),
    ],
)
def test_a_damaged_file_is_refused_and_the_next_one_is_read(data: bytes) -> None:
    assert refusal(data)
    assert pdf_text(pdf("Hello")) == "Hello"


def test_pages_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PDF_PAGES", 2)
    assert pdf_text(pdf("a", "b")) == "a\n\nb"
    assert refusal(pdf("a", "b", "c")) == "has 3 pages; the limit is 2"


def test_text_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PDF_CHARACTERS", 3)
    assert pdf_text(pdf("abc")) == "abc"
    assert "limit of 3 characters" in refusal(pdf("ab", "cd"))


@pytest.mark.slow
def test_time_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PDF_SECONDS", 1)
    monkeypatch.setattr(limits, "PDF_PAGES", 10**6)
    assert "can't be read" in refusal(pdf(*(f"Page {n}" for n in range(20_000))))


def test_processes_and_their_memory_have_limits() -> None:
    processes = PDF_PROCESSES
    assert processes._program.memory == limits.PDF_MEMORY
    assert limits.PDF_PROCESSES >= limits.IDLE_PDF_PROCESSES
    assert processes._most_each == limits.CLIENT_PDF_PROCESSES


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
