"""Files within a message."""

import base64
from typing import Any

import pytest

from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.responses.input import input_items, to_request
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation
from tests.pdf.files import pdf

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
        (url(b"<a/>", "image/svg+xml"), None),
        (url(b"<a/>", "application/atom+xml"), "<a/>"),
        (url(b"", "TEXT/CSV"), ""),
        ("data:;base64,SGk=", "Hi"),
        (url(b"\xef\xbb\xbfHi"), "Hi"),
    ],
)
def test_text_is_read(read: Any, place: str, data: str, text: str | None) -> None:
    if text is None:
        with pytest.raises(BadRequest):
            read(file_data=data)
        return
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


@BOTH
@pytest.mark.parametrize(
    ("file", "param"),
    [
        ({"file_data": url(b"%PDF-1.7", "application/pdf")}, "file_data"),
        ({"file_data": url(b"x", "image/png")}, "file_data"),
        ({"file_data": "iVBORw0KGgo="}, "file_data"),
        ({"file_data": "x = 1"}, "file_data"),
        ({"file_data": url(b"x", "x" * 10_000)}, "file_data"),
        ({"file_data": url(b"\xff\xfe")}, "file_data"),
        ({"file_data": url(b"x", "text/plain;charset=klingon")}, "file_data"),
        ({"file_data": url(b"x", "text/plain;charset=zlib")}, "file_data"),
        ({"file_data": "data:text/plain;base64,!"}, "file_data"),
        ({"file_data": "data:text/plain,Hi"}, "file_data"),
        ({"file_data": "data:" + ";" * 100_000}, "file_data"),
        ({"file_id": "file-1"}, "file_id"),
        ({"file_url": "http://127.0.0.1/x"}, "file_url"),
        ({"filename": "x.txt"}, "file_data"),
    ],
)
def test_anything_else_is_refused(read: Any, place: str, file: Json, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**file)
    assert caught.value.param == f"{place}.{param}"
    assert f"`{place}.{param}`" in caught.value.message
    assert len(caught.value.message) < 400
