"""Writes what the server answers into a transcript, while clients get the same answers."""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import yaml

from mlx_server.errors import public_message
from mlx_server.events import Answer, Event, Finished, Started
from mlx_server.requests import GenerateRequest, Prompt
from mlx_server.sources.redaction import matching, without_secrets
from mlx_server.sources.transcript import facts_of
from mlx_server.system.files import not_linked, own_path

log = logging.getLogger("mlx_server")

Entry = dict[str, Any]


class TranscriptRecorder:
    def __init__(self, file: Path, secrets: Collection[str] = ()) -> None:
        """Entries are added to the file. secrets: texts that it must not have."""
        self._file = file
        self._secrets = secrets
        self._writing = asyncio.Lock()

    async def recorded(
        self, request: GenerateRequest, events: AsyncGenerator[Event]
    ) -> AsyncGenerator[Event]:
        """The same events. An answer is in the file before its end goes on to the client."""
        answers: dict[int, Answer] = defaultdict(Answer)
        async with aclosing(events):
            async for event in events:
                if not isinstance(event, Started):
                    answers[event.index].add(event)
                if isinstance(event, Finished):
                    prompt = request.prompts[event.index // request.n]
                    await self._write(request.model, prompt, answers.pop(event.index))
                yield event

    async def _write(self, model: str, prompt: Prompt, answer: Answer) -> None:
        try:
            async with self._writing:
                await asyncio.to_thread(self._append, prompt, answer)
        except (ValueError, OSError) as error:  # the client has its answer all the same
            log.error("an answer of %s was not recorded: %s", model, public_message(error))

    def _append(self, prompt: Prompt, answer: Answer) -> None:
        """Runs in a thread, since writing a large answer as YAML takes seconds."""
        entry = {**conditions(prompt), "answer": in_words(answer)}
        text = written([without_keys(entry, self._secrets)])
        with open(own_path(self._file), "a", encoding="utf-8", opener=not_linked) as file:
            file.write(text)


def conditions(prompt: Prompt) -> Entry:
    """By the last user text, and by the turn for all but the first answer of a conversation."""
    facts = facts_of(prompt, ())
    return {"match": facts.user} | ({"turn": facts.turn} if facts.turn > 1 else {})


def in_words(answer: Answer) -> Entry:
    """The answer as a transcript has it for any family. Raises ValueError for a broken call."""
    calls = [{"name": c.name, "arguments": json.loads(c.arguments or "{}")} for c in answer.calls]
    found: Entry = {"reasoning": answer.thoughts, "text": answer.text, "calls": calls}
    return {name: value for name, value in found.items() if value} or {"text": ""}


def without_keys(entry: Entry, known: Collection[str] = ()) -> Entry:
    return {**without_secrets(entry, known), "match": matching(entry["match"], known)}


def written(entries: Collection[Entry]) -> str:
    return yaml.safe_dump(list(entries), allow_unicode=True, sort_keys=False, width=100)
