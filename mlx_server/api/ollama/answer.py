"""Folds events into an answer, or the lines of its stream."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from mlx_server.api.accumulator import Accumulator, Timing, arguments_object, logprob_json
from mlx_server.api.embeddings import numbers
from mlx_server.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallFinished,
)
from mlx_server.generation.embeddings import Embeddings
from mlx_server.http.errors import ollama_error
from mlx_server.http.sse import Frames
from mlx_server.messages import ToolCall

Wire = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: Sequence[Wire] = ()


Shape = Callable[[Piece], Wire]
"""A piece as one of the endpoints has it."""


def chat_shape(piece: Piece) -> Wire:
    thinking = {"thinking": piece.thinking} if piece.thinking else {}
    calls = {"tool_calls": list(piece.calls)} if piece.calls else {}
    return {"message": {"role": "assistant", "content": piece.text, **thinking, **calls}}


def generate_shape(piece: Piece) -> Wire:
    thinking = {"thinking": piece.thinking} if piece.thinking else {}
    return {"response": piece.text, **thinking}


class OllamaOutput:
    def __init__(self, *, model: str, shape: Shape, has_body: bool = True) -> None:
        """has_body: whether a body is needed, which has all log probabilities."""
        self._accumulator = Accumulator(model=model, prompts=1, n=1, keeps_logprobs=has_body)
        self._latest: Wire = {}
        self._shape = shape
        self._timing = Timing()

    def add(self, event: Event) -> None:
        for chunk in self.chunks(event):
            self._latest = chunk

    def body(self) -> Wire:
        (answer,), (logprobs,) = self._accumulator.answers, self._accumulator.logprobs
        whole = Piece(answer.text, answer.thoughts, list(map(_called, answer.calls)))
        return {**self._latest, **self._shape(whole), **_logprobs(logprobs)}

    def chunks(self, event: Event) -> Iterator[Wire]:
        self._timing.note(event)
        self._accumulator.add(event)
        match event:
            case TextDelta(_, _, logprobs):
                scored = _logprobs(list(map(logprob_json, logprobs)))
                yield {**self._chunk(Piece(text=event.separated)), **scored}
            case ReasoningDelta():
                yield self._chunk(Piece(thinking=event.separated))
            case ToolCallFinished():
                (answer,) = self._accumulator.answers
                yield self._chunk(Piece(calls=[_called(answer.calls[-1])]))
            case Finished():
                yield self._last(event)

    def end(self) -> Iterator[Wire]:
        yield from ()

    def frames(self) -> Frames:
        """Lines of JSON. A client parses each line, so what keeps a stream alive is a chunk too."""
        return Frames(
            keep_alive=lambda: line(self._chunk(Piece())),
            end=b"",
            error=ollama_error,
            encode=line,
            media_type="application/x-ndjson",
        )

    def _last(self, event: Finished) -> Wire:
        (answer,) = self._accumulator.answers
        tokens = event.completion_tokens
        return {
            **self._chunk(Piece()),
            "done": True,
            "done_reason": "length" if event.reason == "length" else "stop",
            **self._timing.durations(self._accumulator.prompt_tokens, tokens),
            **self._accumulator.warnings(answer),
        }

    def _chunk(self, piece: Piece) -> Wire:
        return chunk(self._accumulator.model, self._shape(piece))


def chunk(model: str, content: Wire) -> Wire:
    return {"model": model, "created_at": rfc3339(time.time()), **content, "done": False}


def loaded(model: str, shape: Shape, reason: str) -> Wire:
    """The answer to a request without a prompt, which loads the model or unloads it."""
    return {**chunk(model, shape(Piece())), "done": True, "done_reason": reason}


def embed_answer(model: str, embeddings: Embeddings | None, began: float) -> Wire:
    """embeddings: None if the request had no input. began: by `time.perf_counter`."""
    return {
        "model": model,
        "embeddings": map(numbers, embeddings.vectors if embeddings else ()),
        "total_duration": int((time.perf_counter() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": embeddings.tokens if embeddings else 0,
    }


def older_embed_answer(embeddings: Embeddings | None) -> Wire:
    return {"embedding": numbers(embeddings.vectors[0]) if embeddings else []}


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def line(data: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def _called(call: ToolCall) -> Wire:
    return {
        "id": call.id,
        "function": {"name": call.name, "arguments": arguments_object(call.arguments)},
    }


def _logprobs(given: Sequence[msgspec.Raw]) -> Wire:
    return {"logprobs": given} if given else {}
