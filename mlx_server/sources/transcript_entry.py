"""One entry of a transcript: a recorded output, and the requests that it answers."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.families.answer_writer import write_answer
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.requests import Prompt

REGEX = "regex:"
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})++")
"""Characters as JSON escapes them, such as an emoji in a tool's result."""


@dataclass(frozen=True)
class RequestFacts:
    """The facts about a request that entries are compared with."""

    user: str
    """The last user message."""
    last: tuple[str, ...]
    """The latest message; the results of the latest calls, if it is one of them."""
    turn: int
    """1 for the conversation's first answer, 2 for its second."""
    step: int
    """The number of answers since the latest user message, such as calls with their results."""
    system: str
    models: tuple[str, ...]
    """The model's name in the request, and its id."""
    tools: frozenset[str]


def facts_of(prompt: Prompt, models: tuple[str, ...]) -> RequestFacts:
    if not isinstance(prompt, Conversation):
        text = prompt if isinstance(prompt, str) else ""
        return RequestFacts(text, (text,), 1, 0, "", models, frozenset())
    messages = prompt.messages
    # an answer at the end is continued, so it is not one of the earlier answers
    earlier = messages[:-1] if messages and messages[-1].role == "assistant" else messages
    asked = max((at for at, m in enumerate(messages) if m.role == "user"), default=-1)
    return RequestFacts(
        user=messages[asked].content if asked >= 0 else "",
        last=tuple(_last(messages)),
        turn=1 + _answers(earlier),
        step=_answers(earlier[asked + 1 :]),
        system="\n".join(m.content for m in messages if m.role in ("system", "developer")),
        models=models,
        tools=frozenset(tool.name for tool in prompt.tools),
    )


def _answers(messages: tuple[Message, ...]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _last(messages: tuple[Message, ...]) -> Iterator[str]:
    for at, message in enumerate(reversed(messages)):
        if at and not message.role == "tool" == messages[-1].role:
            return
        yield message.content


class RecordedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: dict[str, Any] = {}


class RecordedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An answer in words, which each family writes in its own way."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[RecordedCall, ...] = ()

    def message(self) -> Message:
        calls = (
            ToolCall("", call.name, msgspec.json.encode(call.arguments).decode())
            for call in self.calls
        )
        return Message("assistant", self.text, None, self.reasoning or None, tuple(calls))


class TranscriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A condition that is text is the entire text, or `regex:` and a pattern to search for."""

    output: str | None = None
    output_token_ids: tuple[int, ...] | None = None
    answer: RecordedAnswer | None = None
    match: str | None = None
    """The last user message."""
    last: str | None = None
    """The last message of any role, such as a tool's result."""
    turn: int | None = None
    """1 for the conversation's first answer, 2 for its second."""
    system: str | None = None
    """The system and developer messages, joined by line breaks."""
    model: str | None = None
    """The model's name in the request, or its id."""
    tools: tuple[str, ...] | None = None
    """Names of tools that the request offers; an empty list: it offers none."""
    finish: Literal["stop", "length"] = "stop"
    """`stop`: a stop token follows the output; `length`: the output was cut off there."""
    off_grammar: Literal["error", "noise"] = "error"
    """The continuation where the request's grammar refuses the recorded token: an error, or any
    tokens that it allows, as from a model that would never write them by itself."""
    delay_ms: float = 0.0
    """The delay before each further token."""
    generation_prompt: str = ""
    """The end of the prompt, for families whose template leaves the model inside a block."""

    def __post_init__(self) -> None:
        if [self.output, self.output_token_ids, self.answer].count(None) != 2:
            raise ValueError("it needs one of `output`, `output_token_ids` and `answer`")
        if self.finish == "length" and not (self.output or self.output_token_ids):
            raise ValueError("with `finish: length` the `output` can't be empty")
        _check_answer(self.answer)
        for name in ("output", "generation_prompt"):
            if SURROGATE.search(getattr(self, name) or ""):
                raise ValueError(f"`{name}` has half a surrogate pair")
        if not 0 <= self.delay_ms <= 60_000:
            raise ValueError("`delay_ms` should be from 0 to 60000")
        if self.turn is not None and self.turn < 1:
            raise ValueError("`turn` should be 1 or more: 1 is the first answer")
        for name in ("match", "last", "system", "model"):
            _check_pattern(name, getattr(self, name))

    @property
    def has_conditions(self) -> bool:
        names = ("match", "last", "turn", "system", "model", "tools")
        return any(getattr(self, name) is not None for name in names)

    @property
    def names_its_place(self) -> bool:
        """Whether it says itself which step of a loop it answers."""
        return self.last is not None or self.turn is not None

    def mismatch(self, facts: RequestFacts) -> str | None:
        """The name of the first condition that the request does not meet."""
        offered = facts.tools
        met = {
            "match": _holds(self.match, facts.user),
            "last": any(_holds(self.last, text) for text in facts.last),
            "turn": self.turn in (None, facts.turn),
            "system": _holds(self.system, facts.system),
            "model": self.model is None or any(_holds(self.model, n) for n in facts.models),
            "tools": self.tools is None
            or (offered.issuperset(self.tools) if self.tools else not offered),
        }
        return next((name for name, is_met in met.items() if not is_met), None)

    def tokens(self, tokenizer: Tokenizer, family: ModelFamily) -> list[int]:
        """Raises AnswerUnwritable."""
        if self.answer is not None:
            return tokenizer.encode(write_answer(family, tokenizer, self.answer.message()))
        if self.output is not None:
            return tokenizer.encode(self.output)
        return list(self.output_token_ids or ())


def _check_answer(answer: RecordedAnswer | None) -> None:
    try:
        written = json.dumps(msgspec.to_builtins(answer), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError("`answer` has a number that is not finite") from None
    if SURROGATE.search(written):
        raise ValueError("`answer` has half a surrogate pair")


def _check_pattern(name: str, text: str | None) -> None:
    if text is not None and text.startswith(REGEX):
        try:
            re.compile(text.removeprefix(REGEX))
        except re.error as error:
            raise ValueError(f"`{name}` is not a regular expression: {error}") from None


def _holds(wanted: str | None, text: str) -> bool:
    if wanted is None:
        return True
    if wanted.startswith(REGEX):
        pattern = re.compile(wanted.removeprefix(REGEX))
        return any(pattern.search(each) for each in dict.fromkeys((text, comparable(text))))
    return wanted == text or comparable(wanted) == comparable(text)


def comparable(text: str) -> str:
    """The text without white space at its end and without JSON's escapes of characters."""
    return ESCAPE.sub(lambda found: _unescaped(found[0]), text).rstrip()


def _unescaped(escapes: str) -> str:
    units = b"".join(bytes.fromhex(unit) for unit in escapes.split("\\u")[1:])
    return units.decode("utf-16-be", "surrogatepass")
