"""`POST /v1/responses/compact`: the model summarises a conversation that has become too long.

It goes on from the user's messages and the summary, which the client sends back as a sealed item.
This is a module of its own as it asks `create` as a client does.
"""

import time
from typing import Any

from fastapi import Request, Response

from mlx_server.api.fields import MendedItems, ignored_header
from mlx_server.api.handlers import documented, json_response, read, while_connected
from mlx_server.api.responses.create import create, read_wires
from mlx_server.api.responses.items import InputItem, MessageItem, Wire, new_item_id
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.tools import McpTool
from mlx_server.errors import BadRequest
from mlx_server.http.security import keyed_router, signer_of
from mlx_server.request_threads import in_thread

PATH = "/v1/responses/compact"

ASK = (
    "Summarise this conversation for yourself: you will go on with the user's messages and your "
    "summary alone. Keep what was asked, decided, found and done, the names of files and other "
    "facts that are still needed, and what comes next. Write nothing but the summary."
)

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, ResponsesBody))
async def compact_response(http: Request) -> Response:
    body = await read(http, ResponsesBody)
    created = await create(http, body.model_copy(update=_asking(body)))
    try:
        started = await while_connected(http, created.run.begin())
        response = await while_connected(http, created.run.complete())
    finally:
        await created.run.aclose()
    *items, _ = await in_thread(read_wires, created.context)
    compacted = {
        "id": new_item_id("response"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [
            *(item for item in items if (item["type"], item.get("role")) == ("message", "user")),
            {
                "id": new_item_id("compaction"),
                "type": "compaction",
                "encrypted_content": signer_of(http).seal(_summary(response)),
            },
        ],
        "usage": response["usage"],
    }
    return json_response(compacted, ignored_header([*created.ignored, *started.ignored]))


def _asking(body: ResponsesBody) -> dict[str, Any]:
    """The fields in which a request for the summary differs from the client's. The tools are the
    same, so that the prompt begins with what is cached."""
    ask, items = MessageItem(type="message", role="user", content=ASK), body.input or ()
    before: list[InputItem] = (
        [MessageItem(type="message", role="user", content=items)]
        if isinstance(items, str)
        else [*items]
    )
    return {
        "input": MendedItems([*before, ask], getattr(items, "unread", ())),
        "tools": [tool for tool in body.tools or () if not isinstance(tool, McpTool)],
        "tool_choice": "none",
        "truncation": "auto",
        "store": False,
        **dict.fromkeys(("background", "stream", "stream_options", "text", "structured_outputs")),
    }


def _summary(response: Wire) -> str:
    messages = (item for item in response["output"] if item["type"] == "message")
    texts = [part["text"] for item in messages for part in item["content"]]
    if summary := "".join(texts).strip():
        return summary
    raise BadRequest(
        "The model wrote no summary: send a larger `max_output_tokens`, or none.",
        param="max_output_tokens",
    )
