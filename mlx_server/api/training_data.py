"""Reads the lines of a training file, as OpenAI's fine-tuning and mlx-lm have them, and makes such
lines of stored chat completions."""

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec
from pydantic import ValidationError

from mlx_server import limits
from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.api.file_inputs import numbered_lines
from mlx_server.engine.training import TrainingSample
from mlx_server.errors import BadRequest, NotFound, ServerError, TrainingDataInvalid
from mlx_server.generation.training import sample_of
from mlx_server.http import strict_json
from mlx_server.http.errors import validation_error
from mlx_server.messages import Conversation
from mlx_server.pool.prepare import PreparedModel
from mlx_server.store import RecordFilter, Store

FIELDS = ("messages", "tools", "parallel_tool_calls")
SHOWN_MISTAKES = 10

STORED = re.compile(r"stored:([^=]+)=(.+)", re.DOTALL)
"""How training data is named that is the stored chat completions with this pair of metadata."""

PAGE = 100


def samples_of(prepared: PreparedModel, file: BinaryIO) -> list[TrainingSample]:
    """Raises TrainingDataInvalid, which names the first lines that are wrong."""
    samples, mistakes, tokens = list[TrainingSample](), list[str](), 0
    for number, line in numbered_lines(file):
        try:
            samples.append(sample_of(prepared, conversation_of(line)))
            tokens += len(samples[-1].tokens)
            if tokens > (most := limits.TRAINING_TOKENS):
                raise TrainingDataInvalid(f"All lines may have {most} tokens. Send fewer.")
        except ServerError as error:
            mistakes.append(f"line {number}: {error.message}")
            if len(mistakes) == SHOWN_MISTAKES or tokens > limits.TRAINING_TOKENS:
                break
    if mistakes:
        raise TrainingDataInvalid("The training data can't be used. " + " ".join(mistakes))
    return samples


def conversation_of(line: bytes) -> Conversation:
    """Raises BadRequest for a line that is neither `messages` nor `prompt` with `completion`."""
    if len(line) > (most := limits.BATCH_LINE_BYTES):
        raise BadRequest(f"A line may have {most} bytes.")
    sample = strict_json.parse_request(line)
    if isinstance(sample, dict) and isinstance(sample.get("prompt"), str):
        answer = sample.get("completion")
        prompt = {"role": "user", "content": sample["prompt"]}
        sample = {"messages": [prompt, {"role": "assistant", "content": answer}]}
    if not isinstance(sample, dict) or "messages" not in sample:
        raise BadRequest('Send {"messages": [...]} or {"prompt": "...", "completion": "..."}.')
    messages = sample["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("weight") == 0:
        raise BadRequest(
            "The last message has the weight 0, but it is all that is learnt of a line. Leave the "
            "line out, or end it with the message that is to be learnt."
        )
    body = {"model": "base", **{name: sample[name] for name in FIELDS if name in sample}}
    try:
        (conversation,) = to_request(ChatBody.model_validate(body)).prompts
    except ValidationError as error:
        raise validation_error(error, body) from None
    assert isinstance(conversation, Conversation)
    return conversation


async def stored_lines(store: Store, owner: str, key: str, value: str) -> AsyncIterator[bytes]:
    """Yields a line for each stored chat completion that was marked so and came to its end."""
    selection, after = RecordFilter(metadata={key: value}), None
    while page := (await store.records("completion", owner, selection, after, PAGE)).items:
        after = page[-1].id
        for item in page:
            body = msgspec.json.decode(item.body, type=dict[str, Any])
            choice = body["choices"][0]
            if choice["finish_reason"] != "length":
                with suppress(NotFound):  # it was deleted meanwhile
                    most = limits.JSON_NODES  # of a request
                    sent = await store.items("completion", item.id, owner, None, most, "asc")
                    messages = [_message(each.body) for each in sent.items]
                    tools = {"tools": body["tools"]} if body.get("tools") else {}
                    line = {"messages": [*messages, choice["message"]], **tools}
                    yield msgspec.json.encode(line) + b"\n"


def _message(stored: bytes) -> dict[str, Any]:
    """The message as it was sent, before OpenAI's stored form was made of it."""
    message = msgspec.json.decode(stored, type=dict[str, Any])
    parts = message.pop("content_parts")
    return {**message, "content": parts or message["content"]}
