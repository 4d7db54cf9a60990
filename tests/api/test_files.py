"""Files within a message."""

import base64
from typing import Any

import pytest

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.responses.input import input_items, to_request
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.messages import Conversation
from tests.sandbox.pdf_files import pdf

Json = dict[str, Any]


def url(data: bytes, kind: str = "text/plain") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def in_chat(**file: Any) -> str:
    content = [{"type": "text", "text": "What is it?"}, {"type": "file", "file": file}]
    message = {"role": "user", "content": content}
    (prompt,) = of_chat(ChatBody.model_validate({"model": "m", "messages": [message]})).prompts
    assert isinstance(prompt, Conversation)
    return prompt.messages[0].content


def in_responses(**file: Any) -> str:
    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_file", **file}]
    body = ResponsesBody.model_validate(
        {"model": "m", "input": [{"role": "user", "content": content}]}
    )
    nothing = dict[str, Any]()
    items = input_items(body, nothing.__getitem__)
    (prompt,) = to_request(body, items, opened=nothing.get).request.prompts
    assert isinstance(prompt, Conversation)
    return prompt.messages[0].content


BOTH = pytest.mark.parametrize(
    ("read", "place"),
    [(in_chat, "messages[0].content[1].file"), (in_responses, "input[0].content[1]")],
)


@BOTH
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (url(b"x = 1\n"), "x = 1\n"),
        (url("Salü 🙂".encode(), "text/markdown; charset=utf-8"), "Salü 🙂"),
        (url("Salü".encode("latin-1"), "text/plain;charset=iso-8859-1"), "Salü"),
        (url(b"{}", "application/json"), "{}"),
        (url(b"<a/>", "application/atom+xml"), "<a/>"),
        (url(b"", "TEXT/CSV"), ""),
        ("data:;base64,SGk=", "Hi"),
        (url(b"\xef\xbb\xbfHi"), "Hi"),
    ],
)
def test_text_is_read(read: Any, place: str, data: str, text: str) -> None:
    assert read(file_data=data) == f"What is it?\n{text}"
    assert read(file_data=data, filename="a.txt") == f"What is it?\na.txt\n{text}"


@BOTH
def test_base64_alone_is_read(read: Any, place: str) -> None:
    assert read(file_data=base64.b64encode(b"x = 1").decode()) == "What is it?\nx = 1"


@BOTH
def test_the_text_of_pdf_is_read(read: Any, place: str) -> None:
    data = pdf("Hello")
    for given in (url(data, "application/pdf"), base64.b64encode(data).decode()):
        assert read(file_data=given, filename="a.pdf") == "What is it?\na.pdf\nHello"


TEXTUAL, BASE64 = "it is neither text nor PDF", "its data is not base64"
ELSEWHERE = "this server keeps no files and fetches none"
ENCODED = "it is not text in its encoding, nor a PDF file"


@BOTH
@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            {"file_data": url(b"%PDF-1.7", "application/pdf")},
            "[file: application/pdf, not shown: the PDF file is damaged]",
        ),
        (
            {"file_data": url(b"x", "image/png")},
            "[image: image/png, not shown: this model reads only text]",
        ),
        (
            {"file_data": url(b"<a/>", "image/svg+xml")},
            "[image: image/svg+xml, not shown: this model reads only text]",
        ),
        (
            {"filename": "a.zip", "file_data": url(b"x", "application/zip")},
            f"[file: a.zip application/zip, not shown: {TEXTUAL}]",
        ),
        ({"file_data": "iVBORw0KGgo="}, f"[file, not shown: {ENCODED}]"),
        ({"file_data": "x = 1"}, f"[file, not shown: {BASE64}]"),
        ({"file_data": url(b"x", "x" * 10_000)}, f"[file: {'x' * 195}, not shown: {BASE64}]"),
        ({"file_data": url(b"\xff\xfe")}, f"[file: text/plain, not shown: {ENCODED}]"),
        (
            {"file_data": url(b"x", "text/plain;charset=klingon")},
            f"[file: text/plain, not shown: {ENCODED}]",
        ),
        (
            {"file_data": url(b"x", "text/plain;charset=zlib")},
            f"[file: text/plain, not shown: {ENCODED}]",
        ),
        (
            {"file_data": "data:text/plain;base64,!"},
            f"[file: text/plain, not shown: {BASE64}]",
        ),
        ({"file_data": "data:text/plain,Hi"}, f"[file: text/plain, not shown: {BASE64}]"),
        ({"file_data": "data:" + ";" * 100_000}, f"[file, not shown: {BASE64}]"),
        ({"file_id": "file-1"}, f"[file: file-1, not shown: {ELSEWHERE}]"),
        ({"file_url": "http://a/x"}, f"[file: http://a/x, not shown: {ELSEWHERE}]"),
        ({"filename": "x.txt"}, f"[file: x.txt, not shown: {ELSEWHERE}]"),
    ],
)
def test_a_line_says_that_anything_else_is_not_shown(
    read: Any, place: str, file: Json, line: str
) -> None:
    assert read(**file) == f"What is it?\n{line}"
