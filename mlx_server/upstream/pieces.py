"""Reads one JSON value of an upstream's answer, a body or a chunk, as a piece of the answer: its
texts, calls, log probabilities and usage. Tokens that an upstream does not count are estimated."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any

import msgspec

from mlx_server.errors import UpstreamFailed
from mlx_server.events import TokenLogprob
from mlx_server.upstream.dialects import DETAILS, REASONING, reason_of_end


class GrowingText:
    """A text that arrives in pieces, each of which takes no more work than it is long."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0

    def __str__(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self.size += len(piece)


MAX_TOKENS = 1 << 40
"""A count of tokens that is not below this bound is taken to be wrong."""

CHARACTERS_PER_TOKEN = 4
"""The characters per token by which tokens are estimated if an upstream does not count them."""


@dataclass(frozen=True, slots=True)
class UpstreamUsage:
    prompt: int | None = None
    completion: int | None = None
    cached: int = 0
    reasoning: int | None = None
    accepted: int = 0
    """The completion tokens that had no pass of their own."""


def is_counted(usage: UpstreamUsage | None, characters: int) -> bool:
    """Whether the upstream's count of tokens is plausible: 0 is not for an answer with text."""
    completion = usage.completion if usage else None
    return completion is not None and (completion > 0 or not characters)


def usage_of(value: Mapping[str, Any]) -> UpstreamUsage | None:
    """The counts in a chunk or body; None if there are none."""
    usage = value.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if prompt is None and completion is None:
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
    details = usage.get("completion_tokens_details")
    reasoning = _count(details, "reasoning_tokens")
    accepted = _count(details, "accepted_prediction_tokens") or 0
    accepted = min(accepted, max(0, (completion or 0) - 1))
    return UpstreamUsage(prompt, completion, min(cached, prompt or 0), reasoning, accepted)


def _count(value: object, name: str) -> int | None:
    count = value.get(name) if isinstance(value, Mapping) else None
    return count if type(count) is int and 0 <= count < MAX_TOKENS else None


def logprobs_of(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a choice, without entries that lack a token or a number."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        return ()
    if isinstance(content := logprobs.get("content"), list):
        return tuple(_of_chat(content))
    return tuple(_of_completions(logprobs))


def _of_chat(content: list[Any]) -> Iterator[TokenLogprob]:
    for entry in content:
        if isinstance(entry, Mapping):
            top = entry.get("top_logprobs")
            yield from _token_logprob(
                entry.get("token"),
                entry.get("logprob"),
                entry.get("bytes"),
                tuple(_of_chat(top)) if isinstance(top, list) else (),
            )


def _of_completions(logprobs: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    tokens, values, tops = (
        each if isinstance(each := logprobs.get(name), list) else []
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    for token, value, top in zip_longest(tokens, values, tops):
        likely = top.items() if isinstance(top, Mapping) else ()
        yield from _token_logprob(
            token, value, None, tuple(each for pair in likely for each in _token_logprob(*pair))
        )


def _token_logprob(
    token: object, value: object, spelled: object = None, top: tuple[TokenLogprob, ...] = ()
) -> Iterator[TokenLogprob]:
    if not isinstance(token, str) or isinstance(value, bool) or not isinstance(value, int | float):
        return
    try:
        raw = bytes(spelled) if isinstance(spelled, list) else token.encode()
    except (TypeError, ValueError):
        raw = token.encode("utf-8", "replace")
    yield TokenLogprob(token, raw, float(value), top)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning in a message or a delta."""
    texts = [value for name in REASONING if (value := message.get(name))]
    for text in texts:
        if not isinstance(text, str):
            raise UpstreamFailed("The upstream sent reasoning that is not text.")
    if texts:
        return str(texts[0])
    parts = (detail.get("text") or detail.get("summary") for detail in details_of(message))
    return "".join(part for part in parts if isinstance(part, str))


def details_of(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The signed parts of the reasoning, as they came."""
    details = message.get(DETAILS)
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, Mapping) and isinstance(detail.get("type"), str):
            yield detail


@dataclass(frozen=True, slots=True)
class CallPiece:
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra_content: Mapping[str, Any] = field(default_factory=dict)
    """The provider's own fields of the call, which must be sent back with it, for example Gemini's
    signature of the thoughts."""


def calls_of(message: Mapping[str, Any], *, are_whole: bool) -> Iterator[CallPiece]:
    """Yields the calls of a message or delta. are_whole: whether each call is complete, so that
    wrong indices do not matter."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UpstreamFailed("The upstream sent `tool_calls` that are not a list.")
    for position, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise UpstreamFailed("The upstream sent a call that is not an object.")
        piece = _call_piece(call)
        yield replace(piece, index=position) if are_whole else piece


def _call_piece(call: Mapping[str, Any]) -> CallPiece:
    entry = call.get("function")
    function: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    index, id, name = call.get("index"), call.get("id"), function.get("name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    extra = call.get("extra_content")
    return CallPiece(
        index=index if type(index) is int else None,
        extra_content=extra if isinstance(extra, Mapping) else {},
        id=id if isinstance(id, str) else "",
        name=name if isinstance(name, str) else "",
        arguments=arguments,
    )


GROWING = ("text", "summary", "signature")
"""Fields of a detail whose text a stream sends in pieces."""


class ReasoningDetails:
    """The details of one answer, which the next request must send back to the upstream."""

    def __init__(self) -> None:
        self._details: list[dict[str, Any]] = []
        self.size = 0
        """The number of bytes of their JSON, about."""

    def add(self, pieces: Iterable[Mapping[str, Any]]) -> None:
        for piece in pieces:
            if not (self._details and _continues(self._details[-1], piece)):
                self._details.append({})
            self.size += _extend(self._details[-1], piece)

    def found(self) -> dict[str, Any]:
        """The details as the field of a message; empty if there are none."""
        return {DETAILS: [_joined(detail) for detail in self._details]} if self._details else {}


def _continues(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    """Whether a piece continues the last detail. Encrypted details always come in one piece."""
    if "data" in piece or "data" in detail:
        return False
    return all(detail.get(name) == piece.get(name) for name in ("type", "index"))


def _extend(detail: dict[str, Any], piece: Mapping[str, Any]) -> int:
    """Adds a piece to its detail; returns the number of bytes that the detail grew by, about."""
    size = 0
    for name, value in piece.items():
        before = detail.get(name)
        if name in GROWING and isinstance(value, str):
            pieces = before if isinstance(before, GrowingText) else GrowingText()
            pieces.add(value)
            detail[name] = pieces
            size += len(value)
        elif name not in detail or not (value is None or value == before):
            detail[name] = value
            size += len(name) + len(msgspec.json.encode(value))
    return size


def _joined(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, GrowingText) else v for k, v in detail.items()}


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish: str | None = None
    stop: str | None = None
    """The stop string that ended the answer, if the upstream names it."""
    usage: UpstreamUsage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int | None = 0
    """The index of the answer; None if the piece belongs to none."""
    has_others: bool = False
    """Whether the same value has pieces of other answers."""
    details: tuple[Mapping[str, Any], ...] = ()
    """The unchanged `reasoning_details`, which OpenRouter needs back for their signatures."""
    reasoning_field: str | None = None
    """The field that had the reasoning as text; None if there is none."""


PART_CHARACTERS = 256
"""The most characters of a text that are parsed at a time. Some texts take 25 us a character."""


def read_piece(value: Any) -> AnswerPiece:
    """Reads one JSON value of a response. Raises UpstreamFailed for a value that is not part of an
    answer."""
    if not isinstance(value, Mapping):
        raise UpstreamFailed("The upstream sent JSON that is not an object.")
    choices, usage = value.get("choices"), usage_of(value)
    choice = _first_choice(choices)
    if choice is None:
        return AnswerPiece(usage=usage, choice=None)
    delta, message = choice.get("delta"), choice.get("message")
    is_whole = delta is None and message is not None
    fields = message if delta is None else delta
    if fields is None:
        fields = {"content": choice.get("text")}
    if not isinstance(fields, Mapping):
        raise UpstreamFailed("The upstream sent a `delta` that is not an object.")
    stop, parts = choice.get("stop_reason"), fields.get("content")
    thought = ""
    if isinstance(parts, list):  # as Mistral's models that think have it
        thought = _of_type("thinking", parts)
        fields = {**fields, "content": _of_type("text", parts)}
    return AnswerPiece(
        text=_text(fields, "content") or _text(fields, "refusal"),
        reasoning=reasoning_of(fields) or thought,
        calls=tuple(calls_of(fields, are_whole=is_whole)),
        finish=reason_of_end(choice.get("finish_reason")),
        stop=stop if isinstance(stop, str) and choice.get("finish_reason") else None,
        usage=usage,
        logprobs=logprobs_of(choice),
        choice=_index(choice),
        has_others=isinstance(choices, list) and len(choices) > 1,
        details=tuple(details_of(fields)),
        reasoning_field=next((name for name in REASONING if fields.get(name)), None),
    )


def split(piece: AnswerPiece) -> Iterator[AnswerPiece]:
    """Yields a piece in parts whose texts are short."""
    text, reasoning, size = piece.text, piece.reasoning, PART_CHARACTERS
    if len(text) <= size and len(reasoning) <= size:  # the usual case
        yield piece
        return
    for begin in range(0, len(reasoning), size):
        yield AnswerPiece(reasoning=reasoning[begin : begin + size])
    tokens = deque(piece.logprobs)
    left = sum(len(token.token) for token in tokens)
    for begin in range(0, len(text), size):
        logprobs = []  # the tokens of other text, such as thoughts, come first
        while tokens and left > len(text) - begin - size:
            left -= len(tokens[0].token)
            logprobs.append(tokens.popleft())
        yield AnswerPiece(text=text[begin : begin + size], logprobs=tuple(logprobs))
    yield replace(piece, text="", reasoning="", logprobs=())


def _first_choice(choices: Any) -> Mapping[str, Any] | None:
    """The choice with the lowest index; None if there is none, as in a chunk with the usage."""
    if choices is None:
        return None
    if not isinstance(choices, list):
        raise UpstreamFailed("The upstream sent `choices` that are not a list.")
    if not all(isinstance(choice, Mapping) for choice in choices):
        raise UpstreamFailed("The upstream sent a choice that is not an object.")
    return min(choices, key=_index, default=None)


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int else 0


def _of_type(kind: str, parts: Iterable[Any]) -> str:
    """The text of the parts of a type, each a text or a list of texts."""
    ours = (part for part in parts if isinstance(part, Mapping) and part.get("type") == kind)
    values = (part.get(kind) for part in ours)
    lists = (value if isinstance(value, list) else [{"text": value}] for value in values)
    return "".join(_text(each, "text") for each in chain(*lists) if isinstance(each, Mapping))


def _text(fields: Mapping[str, Any], name: str) -> str:
    text = fields.get(name)
    if text is not None and not isinstance(text, str):
        raise UpstreamFailed(f"The upstream sent a `{name}` that is not text.")
    return text or ""
