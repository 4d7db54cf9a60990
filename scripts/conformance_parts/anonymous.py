"""Recorded requests as conversations without their words.

Each word becomes a made-up one, always the same, so what two prompts share and where they part is
as it was; no sentence, path or key of a client is left. Three words of four are left out, none that
has a digit: what changes from one request to the next is mostly a number.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.messages.input import MessagesBody
from mlx_server.api.messages.input import to_request as of_messages
from mlx_server.api.responses.input import input_items
from mlx_server.api.responses.input import to_request as of_responses
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message
from mlx_server.requests import GenerateRequest

Json = dict[str, Any]

WORDS = ["file", "line", "test", "error", "value", "read", "write", "call", "name", "path"]
KEPT = 4
"""One word of so many is kept."""
SAID = ("description", "title", "default", "const", "enum", "examples", "pattern")
"""Keys of a JSON schema with a client's words."""


def _of_messages(body: Json) -> GenerateRequest:
    return of_messages(MessagesBody.model_validate(body), Signer(b"")).request


def _of_chat(body: Json) -> GenerateRequest:
    return of_chat(ChatBody.model_validate(body))


def _of_responses(body: Json) -> GenerateRequest:
    read, nothing = ResponsesBody.model_validate(body), dict[str, Any]()
    items = input_items(read, nothing.__getitem__)
    return of_responses(read, items, opened=nothing.get).request


READERS: Mapping[str, Callable[[Json], GenerateRequest]] = {
    "/v1/messages": _of_messages,
    "/v1/chat/completions": _of_chat,
    "/v1/responses": _of_responses,
}


def anonymous(requests: Iterable[tuple[str, Json]]) -> str:
    """Returns the requests as JSON: each message and tool once, and which of them each request
    has."""
    messages: list[Json] = []
    tools: list[list[Json]] = []
    found = []
    for path, body in requests:
        if not (reader := READERS.get(path.partition("?")[0])):
            continue
        (conversation,) = reader(body).prompts
        assert isinstance(conversation, Conversation)
        numbers = [_number(each, messages) for each in _merged(conversation.messages)]
        found.append({"tools": _number(_tools(conversation), tools), "messages": numbers})
    parts: dict[str, list[Any]] = {"messages": messages, "tools": tools, "requests": found}
    rows = (
        f'"{name}": [\n' + ",\n".join(json.dumps(value) for value in values) + "\n]"
        for name, values in parts.items()
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _number(value: Any, known: list[Any]) -> int:
    if value not in known:
        known.append(value)
    return known.index(value)


def _merged(messages: Iterable[Message]) -> Iterator[Json]:
    """Merges texts of one role in a row into one message, and makes a later system message the
    user's: some templates refuse others."""
    first = True
    for role, group in groupby(map(_message, messages), key=lambda message: message["role"]):
        if role == "system" and not first:
            role = "user"
        first = False
        if role in ("system", "user"):
            yield {"role": role, "content": "\n\n".join(each["content"] for each in group)}
        else:
            yield from group


def _message(message: Message) -> Json:
    role = "system" if message.role == "developer" else message.role
    found: Json = {"role": role, "content": without_words(message.content)}
    if message.reasoning:
        found["reasoning_content"] = without_words(message.reasoning)
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": _id(call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = _id(message.tool_call_id)
    return found


def _tools(conversation: Conversation) -> list[Json]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": without_words(tool.description or ""),
                "parameters": _schema(dict(tool.parameters)),
            },
        }
        for tool in conversation.tools
    ]


def _schema(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in SAID or isinstance(v, dict)}
        texts = {
            k: without_words(v) for k, v in value.items() if k == "description" and v == str(v)
        }
        return {k: _schema(v) for k, v in kept.items()} | texts
    return [_schema(each) for each in value] if isinstance(value, list) else value


def _arguments(text: str) -> str:
    return json.dumps(_texts(json.loads(text or "{}")))


def _texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _texts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_texts(each) for each in value]
    return without_words(value) if isinstance(value, str) else value


def without_words(text: str) -> str:
    return " ".join(_words(text))


def _words(text: str) -> Iterator[str]:
    for word in re.findall(r"\w+", text):
        number = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4])
        if any(map(str.isdigit, word)):
            yield str(number % 1000)
        elif number % KEPT == 0:
            yield WORDS[number // KEPT % len(WORDS)]


def _id(id: str) -> str:
    return f"call_{hashlib.sha256(id.encode()).hexdigest()[:8]}"
