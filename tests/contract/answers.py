"""Chat completions as they come over the wire, whole or streamed, put together and checked."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PATH = "/v1/chat/completions"


@dataclass
class Answer:
    """One choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments."""
    deltas: int = 0
    """Pieces of arguments, if it was streamed."""
    finish: str | None = None
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    answers: list[Answer]
    usage: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        found: int = self.usage["completion_tokens"]
        return found

    @property
    def reasoning_tokens(self) -> int:
        found: int = self.usage["completion_tokens_details"]["reasoning_tokens"]
        return found


class NotAnswered(Exception):
    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {error.get('message')}")
        self.status, self.error = status, error


def whole(body: Mapping[str, Any]) -> Completion:
    return Completion([_choice(choice) for choice in body["choices"]], body["usage"])


def _choice(choice: Mapping[str, Any]) -> Answer:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Answer(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content", ""),
        calls=[[call["name"], call["arguments"]] for call in calls],
        finish=choice["finish_reason"],
        logprobs=choice["logprobs"] and choice["logprobs"]["content"],
    )


def streamed(chunks: Sequence[Mapping[str, Any]], n: int, *, logprobs: bool) -> Completion:
    answers = [Answer(logprobs=[] if logprobs else None) for _ in range(n)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add(answers[choice["index"]], choice)
    return Completion(answers, chunks[-1].get("usage") or {})


def _add(answer: Answer, choice: Mapping[str, Any]) -> None:
    assert answer.finish is None, "behind its end"
    delta = choice["delta"]
    answer.text += delta.get("content") or ""
    answer.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            assert call["index"] == len(answer.calls)
            answer.calls.append([call["function"]["name"], ""])
        arguments = call["function"]["arguments"]
        answer.deltas += bool(arguments)
        answer.calls[call["index"]][1] += arguments
    if choice["logprobs"]:
        assert answer.logprobs is not None
        answer.logprobs += choice["logprobs"]["content"]
    answer.finish = choice["finish_reason"]


async def asked(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Completion:
    """Raises NotAnswered."""
    if not body.get("stream"):
        response = await http.post(PATH, json=body)
        if response.status_code != 200:
            raise NotAnswered(response.status_code, response.json()["error"])
        return whole(response.json())
    chunks = [chunk async for chunk in stream(http, body)]
    return streamed(chunks, body.get("n") or 1, logprobs=bool(body.get("logprobs")))


async def stream(http: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    asking = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", PATH, json=asking) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            raise NotAnswered(response.status_code, error)
        read = b""
        async for piece in response.aiter_bytes():
            *lines, read = (read + piece).split(b"\n")  # not at what else ends a line of text
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))
