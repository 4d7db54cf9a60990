"""`mlx-server replay record`: a real model's answers as a transcript for a replay model."""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mlx_server.api.chat_completions.input import to_request
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.errors import validation_error
from mlx_server.api.transcript_recorder import Entry, conditions, in_words, without_keys
from mlx_server.cli.upstream_recording import RecordedServer
from mlx_server.engine.messages import Token
from mlx_server.errors import BadRequest, public_message
from mlx_server.events import Answer, Started
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import plan, shortened
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

MAX_FILE_BYTES = 64 << 20

Body = dict[str, Any]
"""The body of a request to /v1/chat/completions."""


def read_requests(path: Path, model: str) -> list[tuple[Body, GenerateRequest]]:
    """Reads a YAML list or JSON Lines of user texts or of /v1/chat/completions bodies.

    Raises BadRequest for a file or an item that is neither.
    """
    try:
        items = _items(path)
    except OSError as error:
        raise BadRequest(f"{path.name} can't be read: {public_message(error)}.") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise BadRequest(f"{path.name} is not a file of YAML or JSON Lines: {error}") from None
    if not isinstance(items, list):
        raise BadRequest(f"{path.name} should have a list of requests.")
    return list(_requests(items, model))


def _items(path: Path) -> Any:
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    text = raw.decode("utf-8-sig")
    if path.suffix in (".jsonl", ".ndjson"):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return yaml.safe_load(text) or []


def _requests(items: Iterable[Any], model: str) -> Iterator[tuple[Body, GenerateRequest]]:
    for i, item in enumerate(items):
        body = {"messages": [{"role": "user", "content": item}]} if isinstance(item, str) else item
        try:
            yield body, to_request(ChatBody.model_validate({**body, "model": model}))
        except ValidationError as error:
            problem = validation_error(error, body)
            raise BadRequest(f"Request {i + 1}: {problem.message}", param=problem.param) from None
        except TypeError:
            raise BadRequest(
                f"Request {i + 1} must be a text or a body of /v1/chat/completions."
            ) from None


def record_upstream(
    server: RecordedServer,
    requests: list[tuple[Body, GenerateRequest]],
    on_entry: Callable[[Entry], None],
) -> list[Entry]:
    """Records another server, like `record`. Entries have the answers in words, for any family."""
    entries: list[Entry] = []
    answers = server.answers(body for body, _ in requests)
    for answer, (_, request) in zip(answers, requests, strict=True):
        entry = {**conditions(request.prompts[0]), "answer": answer}
        entries.append(without_keys(entry, [server.key or ""]))
        on_entry(entries[-1])
    return entries


def record(
    spec: ModelSpec, requests: list[GenerateRequest], on_entry: Callable[[Entry], None]
) -> list[Entry]:
    """One transcript entry for each request, in order. `on_entry` gets each when it is done.

    A model that this server runs is recorded as it writes, a model on another server in words.
    """
    return asyncio.run(_recorded(spec, requests, on_entry))


async def _recorded(
    spec: ModelSpec, requests: list[GenerateRequest], on_entry: Callable[[Entry], None]
) -> list[Entry]:
    pool = Pool([spec])
    variable = spec.upstream.api_key_env if spec.upstream else None
    key = os.environ.get(variable) if variable else None
    await pool.start()
    try:
        entries = []
        for request in requests:
            entries.append(without_keys(await _entry(pool, request), [key or ""]))
            on_entry(entries[-1])
        return entries
    finally:
        await pool.stop()


async def _entry(pool: Pool, request: GenerateRequest) -> Entry:
    if pool.upstream(request.model):
        return {**conditions(request.prompts[0]), "answer": await _words(pool, request)}
    prepared = await pool.prepared(request.model)
    planned = await in_thread(plan, prepared, request)
    planned = shortened(planned, prepared, request, pool.most_tokens(prepared, planned.demand.rows))
    tokens: list[Token] = []
    async with (
        pool.lease(prepared, planned.demand) as lease,
        lease.engine.generate(planned.rows[:1]) as feed,
    ):
        lease.began(planned.rows[:1])
        while not (tokens and tokens[-1].finish):
            tokens += [item for item in await feed.take() if isinstance(item, Token)]
    finish = tokens[-1].finish
    # the replay model adds the stop token itself
    ids = [token.id for token in (tokens[:-1] if finish == "stop" else tokens)]
    entry = {**conditions(request.prompts[0]), "output": prepared.checkpoint.tokenizer.raw(ids)}
    return entry | ({"finish": "length"} if finish == "length" else {})


async def _words(pool: Pool, request: GenerateRequest) -> Entry:
    """The answer of a model on another server, as every endpoint has it: read and repaired."""
    answer = Answer()
    async with aclosing(generate(replace(request, buffered=True), pool)) as events:
        async for event in events:
            if not isinstance(event, Started):
                answer.add(event)
    return in_words(answer)
