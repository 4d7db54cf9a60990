"""Reads a piece of an upstream's answer, a body or a chunk, whatever names and types it uses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.errors import UpstreamFailed
from mlx_server.events import TokenLogprob
from mlx_server.upstream.call_pieces import CallPiece, calls_of
from mlx_server.upstream.contents import REASONING, read_content, reasoning_of
from mlx_server.upstream.ends import reason_of_end
from mlx_server.upstream.logprobs import logprobs_of
from mlx_server.upstream.usage import UpstreamUsage, usage_of, whole_number


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
    is_whole: bool = False
    """Whether the piece is a complete message and not a delta."""


PART_CHARACTERS = 256
"""The most characters of a text that are parsed at a time. Some texts take 25 us a character."""


def read_piece(value: Any) -> AnswerPiece:
    """Reads one JSON value of a response. Raises UpstreamFailed for a value that is not part of an
    answer."""
    if not isinstance(value, Mapping):
        raise UpstreamFailed("The upstream sent JSON that is not an object.")
    choices = value.get("choices")
    choice = _first_choice(choices)
    usage = usage_of(value, choice)
    if choice is None:
        return AnswerPiece(usage=usage, choice=None)
    delta, message = _message_object(choice.get("delta")), _message_object(choice.get("message"))
    is_whole = delta is None and message is not None
    said = delta if delta is not None else message
    if said is None:
        said = {"content": choice.get("text")}
    content = read_content(said.get("content"))
    stop = choice.get("stop_reason")
    return AnswerPiece(
        text=content.text or _refusal(said),
        reasoning=reasoning_of(said) or content.thought or reasoning_of(choice),
        calls=tuple(calls_of(said, choice, content.calls, are_whole=is_whole)),
        finish=reason_of_end(choice, said, value),
        stop=stop if isinstance(stop, str) and choice.get("finish_reason") else None,
        usage=usage,
        logprobs=logprobs_of(choice),
        choice=whole_number(choice.get("index")) or 0,
        has_others=isinstance(choices, list) and sum(each is not None for each in choices) > 1,
        details=tuple(_signed_details(said)),
        reasoning_field=next((name for name in REASONING if _is_text(said.get(name))), None),
        is_whole=is_whole,
    )


def split(piece: AnswerPiece) -> Iterator[AnswerPiece]:
    """Yields a piece in parts whose texts are short."""
    text, reasoning, size = piece.text, piece.reasoning, PART_CHARACTERS
    if len(text) <= size and len(reasoning) <= size:  # the usual case
        yield piece
        return
    for begin in range(0, len(reasoning), size):
        yield AnswerPiece(reasoning=reasoning[begin : begin + size])
    for begin in range(0, len(text), size):
        yield AnswerPiece(text=text[begin : begin + size], logprobs=() if begin else piece.logprobs)
    yield replace(piece, text="", reasoning="", logprobs=())


def _message_object(found: Any) -> Mapping[str, Any] | None:
    """A message or a delta as an object; None if there is none."""
    match found:
        case None | Mapping():
            return found
        case str():
            return {"content": found}
        case [Mapping() as only]:
            return only
    raise UpstreamFailed("The upstream sent a `delta` that is not an object.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _signed_details(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    found = said.get("reasoning_details")
    for detail in found if isinstance(found, list) else ():
        if isinstance(detail, Mapping) and isinstance(detail.get("type"), str):
            yield detail


def _first_choice(choices: Any) -> Mapping[str, Any] | None:
    """The choice with the lowest index; None if there is none, as in a chunk with the usage."""
    if isinstance(choices, Mapping):
        is_numbered = bool(choices) and all(str(name).isdigit() for name in choices)
        choices = list(choices.values()) if is_numbered else [choices]
    if choices is None:
        return None
    if not isinstance(choices, list):
        raise UpstreamFailed("The upstream sent `choices` that are not a list.")
    found = [{"text": each} if isinstance(each, str) else each for each in choices if each]
    if not all(isinstance(choice, Mapping) for choice in found):
        raise UpstreamFailed("The upstream sent a choice that is not an object.")
    return min(found, key=lambda each: whole_number(each.get("index")) or 0, default=None)


def _refusal(said: Mapping[str, Any]) -> str:
    refusal = said.get("refusal")
    return refusal if isinstance(refusal, str) else ""
