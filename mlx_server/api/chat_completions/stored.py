"""Chat completions with `store: true`, as OpenAI stores them: the completion and its messages."""

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from mlx_server import limits
from mlx_server.api.chat_completions.output import ChatOutput, Wire
from mlx_server.api.chat_completions.protocol import ChatBody, MessageParam
from mlx_server.api.errors import validation_error
from mlx_server.api.responses.protocol import Metadata
from mlx_server.errors import BadRequest
from mlx_server.events import Event
from mlx_server.store import CompletionFilter, CompletionRecord, ItemRecord, Store

ECHOED = frozenset(
    {
        *("seed", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *("tools", "tool_choice", "response_format"),
    }
)
"""Fields of a request that the stored completion has."""

LABEL = re.compile(r"metadata\[(.*)\]", re.DOTALL)
"""How a query spells one pair of `metadata`."""

_metadata: TypeAdapter[dict[str, str]] = TypeAdapter(Metadata)


class StoringOutput:
    """Folds events as `ChatOutput` does, and stores the completion once it is whole."""

    def __init__(self, output: ChatOutput, body: ChatBody, store: Store, owner: str) -> None:
        self._output, self._store, self._owner = output, store, owner
        self._metadata = checked_metadata(body)
        self._echo = body.model_dump(
            mode="json", by_alias=True, exclude_none=True, include=set(ECHOED)
        )
        self._messages = _message_records(output.id, body.messages)

    async def aggregate(self, events: AsyncIterator[Event]) -> Wire:
        completion = await self._output.aggregate(events)
        await self._add(completion)
        return completion

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[Wire]:
        self._output.keep_logprobs()
        async with aclosing(self._output.chunks(events)) as chunks:
            async for chunk in chunks:
                yield chunk
        await self._add(self._output.body())

    async def _add(self, completion: Wire) -> None:
        stored = with_metadata({**self._echo, **completion}, self._metadata, time.time())
        await self._store.add_completion(stored, self._owner, self._messages)


def checked_metadata(body: ChatBody) -> dict[str, str]:
    try:
        return _metadata.validate_python(body.metadata or {})
    except ValidationError as error:
        found = validation_error(error, body.metadata)
        param = f"metadata.{found.param}" if found.param else "metadata"
        raise BadRequest(f"`{param}`: {found.message}", param=param) from None


def with_metadata(
    completion: Wire, metadata: Mapping[str, str], created_at: float
) -> CompletionRecord:
    labels = {"model": completion["model"], "metadata": metadata}
    return CompletionRecord(
        completion["id"],
        created_at,
        msgspec.json.encode(labels),
        msgspec.json.encode({**completion, "metadata": metadata}),
    )


def _message_records(id: str, messages: Sequence[MessageParam]) -> list[ItemRecord]:
    return [_message_record(f"{id}-{i}", message) for i, message in enumerate(messages)]


def _message_record(id: str, message: MessageParam) -> ItemRecord:
    """OpenAI's stored message has text as `content`, and other content as `content_parts`."""
    sent = message.model_dump(mode="json", by_alias=True, exclude_none=True)
    content = sent.pop("content", None)
    parts = content if isinstance(content, list) else None
    found: dict[str, Any] = {
        "id": id,
        "content": content if parts is None else None,
        "content_parts": parts,
        "refusal": None,
        **sent,
    }
    return ItemRecord(id, msgspec.json.encode(found))


def filter_of(http: Request) -> CompletionFilter:
    """Which completions the query asks for."""
    metadata = {
        found[1]: value
        for name, value in http.query_params.multi_items()
        if (found := LABEL.fullmatch(name))
    }
    if len(metadata) > (most := limits.METADATA):
        raise BadRequest(f"`metadata` can have {most} pairs at most.", param="metadata")
    return CompletionFilter(http.query_params.get("model"), metadata)
