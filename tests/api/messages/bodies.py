"""Bodies of /v1/messages, and the requests that they are."""

from typing import Any

import pytest

from mlx_server.api.messages.input import ParsedMessagesRequest, to_request
from mlx_server.api.messages.protocol import MessagesBody
from mlx_server.errors import BadRequest
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message
from tests.api.wire import Json

SIGNER = Signer(b"key")
HI: Json = {"role": "user", "content": "hi"}
CACHED: Json = {"cache_control": {"type": "ephemeral"}}


def parsed(**asked: Any) -> ParsedMessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [HI], **asked}
    return to_request(MessagesBody.model_validate(body), SIGNER)


def conversation(**asked: Any) -> Conversation:
    (found,) = parsed(**asked).request.prompts
    assert isinstance(found, Conversation)
    return found


def messages(*given: Json, **asked: Any) -> tuple[Message, ...]:
    return conversation(messages=list(given), **asked).messages


def refused(**asked: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parsed(**asked)
    return caught.value


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def use(id: str, **input: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": "f", "input": input}


def result(id: str, content: Any = "done", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def thinking(words: str, signature: str | None = None) -> Json:
    signed = SIGNER.sign(words) if signature is None else signature
    return {"type": "thinking", "thinking": words, "signature": signed}


def system(*blocks: Json) -> Json:
    return {"role": "system", "content": list(blocks)}


SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Json = {"name": "f", "description": "does f", "input_schema": SCHEMA}
LATER: Json = {**TOOL, "name": "later", "defer_loading": True}
LAST: Json = {**TOOL, "name": "last", "defer_loading": True}
