"""Bodies of /v1/chat/completions, and the requests that they are."""

from typing import Any

from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.messages import Conversation, Message
from mlx_server.requests import GenerateRequest
from tests.api import wire
from tests.api.wire import Json

USER: Json = {"role": "user", "content": "Where?"}
FUNCTION: Json = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL: Json = {"type": "function", "function": FUNCTION}


def asked(**given: Any) -> tuple[GenerateRequest, Conversation]:
    body = ChatBody.model_validate({"model": wire.MODEL, "messages": [USER], **given})
    request = to_request(body)
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    return request, conversation


def messages(*given: Json) -> tuple[Message, ...]:
    return asked(messages=[USER, *given])[1].messages[1:]


def calling(*names: str) -> Json:
    calls = [
        {"id": f"id_{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}
