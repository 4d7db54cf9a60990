"""`POST /v1/responses/compact`: the model summarises a conversation.

As with OpenAI, the result has the user's messages and one item for all the rest. That item holds
the model's summary, encrypted; in a later request it becomes a system message.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request

from mlx_server.api.compaction_prompt import SUMMARIZE
from mlx_server.api.responses.create import events_of, read_all
from mlx_server.api.responses.input import ParsedResponsesRequest
from mlx_server.api.responses.items import Wire, new_id
from mlx_server.api.responses.output import ResponseOutput
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.response import new_response
from mlx_server.api.security import signer_of
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, media_places
from mlx_server.requests import GenerateRequest, McpTools


async def compact(http: Request, body: ResponsesBody) -> tuple[Wire, list[str]]:
    """The shortened conversation, and the names of what has no effect."""
    found = await read_all(http, body)
    output = ResponseOutput(new_response(body, "", stored=False))
    async with aclosing(events_of(http, _asking(found.parsed.request))) as events:
        async for event in events:
            output.add(event)
    response = output.response
    summary = "".join(_message_texts(response["output"])).strip()
    if not summary:
        raise BadRequest(
            "The model wrote no summary. Allow more output tokens, or use another model.",
            param="model",
        )
    users = [item for item in [*found.earlier, *found.own] if _is_users(item)]
    sealed = signer_of(http).seal(summary)
    short = {"id": new_id("compaction"), "type": "compaction", "encrypted_content": sealed}
    compacted = {
        "id": new_id("response"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*users, short],
        "usage": response["usage"],
    }
    unseen = dict.fromkeys(media_places(found.parsed.request.prompts))
    return compacted, [*found.parsed.ignored, *unseen]


def _asking(request: GenerateRequest) -> ParsedResponsesRequest:
    """The request for the summary: the conversation without tools or an output format."""
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    messages = (*conversation.messages, Message("user", SUMMARIZE))
    prompt = Conversation(messages, template_kwargs=conversation.template_kwargs)
    text_only = replace(request, prompts=(prompt,), format=None, tool_choice="auto")
    return ParsedResponsesRequest(text_only, McpTools(), ())


def _is_users(item: Wire) -> bool:
    return (item["type"], item.get("role")) == ("message", "user")


def _message_texts(output: Sequence[Wire]) -> list[str]:
    messages = [item for item in output if item["type"] == "message"]
    return [part["text"] for message in messages for part in message["content"]]
