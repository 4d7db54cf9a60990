"""Bodies of /v1/responses, and the requests that they are."""

from collections.abc import Sequence
from typing import Any

import pytest

from mlx_server.api.responses.input import ParsedResponsesRequest, input_items, to_request
from mlx_server.api.responses.items import read_items
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.errors import BadRequest
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation
from mlx_server.requests import GenerateRequest, McpTools
from tests.api.wire import Json

SIGNER = Signer(b"ours")
USER: Json = {"role": "user", "content": "hi"}
FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SERVER: Json = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com"}


def body(**given: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "tiny", "input": "hi", **given})


def parsed(earlier: Sequence[Json] = (), **given: Any) -> ParsedResponsesRequest:
    read = body(**given)
    items = input_items(read, dict[str, Json]().get)
    return to_request(read, items, read_items(earlier), opened=SIGNER.opened)


def asked(earlier: Sequence[Json] = (), **given: Any) -> tuple[GenerateRequest, McpTools]:
    found = parsed(earlier, **given)
    return found.request, found.mcp


def conversation(earlier: Sequence[Json] = (), **given: Any) -> Conversation:
    (prompt,) = parsed(earlier, **given).request.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def names(earlier: Sequence[Json] = (), **given: Any) -> list[str]:
    """Of the tools that the model may call."""
    return [tool.name for tool in conversation(earlier, **given).tools]


def refused(**given: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parsed(**given)
    return caught.value
