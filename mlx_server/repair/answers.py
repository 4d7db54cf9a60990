"""Checks a finished answer that no grammar constrained: it is accepted, repaired or retried."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server import limits
from mlx_server.errors import CompilerUnavailable
from mlx_server.events import FinishReason, RepairKind
from mlx_server.grammars.compiled import CheckedValue, CheckValue, ask
from mlx_server.messages import Conversation, Message
from mlx_server.repair import RepairPolicy
from mlx_server.repair.model_json import json_text, parsed
from mlx_server.requests import Format, JsonFormat, NamedTool, ToolChoice
from mlx_server.sandbox.parent import Stopped


class CheckFailed(Exception):
    """The validation took too long, or the schema is invalid."""


def schema_errors(value: Any, schema: Any, seconds: float = limits.CHECK_SECONDS) -> list[str]:
    """Returns the errors, each as "path: what". Blocks up to `seconds`; raises CheckFailed.

    A schema can make validation take for ever (a pattern that backtracks, references that double at
    every level), so the process that compiles schemas does it.
    """
    try:
        reply = ask(CheckValue(json.dumps(value), json.dumps(schema), seconds))
    except (Stopped, CompilerUnavailable) as why:
        raise CheckFailed(str(why)) from None
    if not isinstance(reply, CheckedValue):
        raise CheckFailed("the schema can't be followed")
    return reply.errors


Check = Callable[[Any, Any], Sequence[str]]
"""A function like `schema_errors`: returns what is wrong with a value by its schema; may raise
CheckFailed."""

CONTENT = "content"

NO_ANSWER = f"{CONTENT}: there is no answer"


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """A finished answer as it was parsed."""

    text: str = ""
    reasoning: str = ""
    calls: int = 0
    """The number of complete tool calls."""
    reason: FinishReason = "stop"
    reasoning_ran_out: bool = False
    """Whether the reasoning was ended by its token budget."""
    call_delimiters: tuple[str, ...] = ()
    """The delimiters that open tool calls in the model's call format."""
    is_unterminated: bool = False
    """Whether the reasoning was not closed, so that the model had not begun to answer."""
    attempted_call: bool = False
    """Whether the model began a call that was not made: of a tool that it does not have, or one
    that stayed incomplete."""


@dataclass(frozen=True, slots=True)
class Requirements:
    format: Format | None = None
    choice: ToolChoice = "auto"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    text: str
    repairs: tuple[tuple[RepairKind, str], ...] = ()
    """The kind and place of each repair, for `Repaired` events."""
    errors: tuple[str, ...] = ()
    """Reasons to retry, each as "path: what". If no retry is allowed, the text is the answer."""


def check_answer(
    raw: RawAnswer, required: Requirements, allowed: RepairPolicy, check: Check = schema_errors
) -> CheckedAnswer:
    """Checks an answer; it may block for seconds if there is a schema."""
    json = required.format if isinstance(required.format, JsonFormat) else None
    if raw.calls or raw.reason == "length":
        return CheckedAnswer(raw.text)
    if required.choice == "required" or isinstance(required.choice, NamedTool):
        return CheckedAnswer(raw.text, errors=(_no_call(required.choice),))
    if raw.text.strip():
        return _followed_schema(raw.text, json, allowed, check)
    found = _promoted(raw, required, allowed, check)
    return found or CheckedAnswer(raw.text, errors=(NO_ANSWER,) if json else ())


def _promoted(
    raw: RawAnswer, required: Requirements, allowed: RepairPolicy, check: Check
) -> CheckedAnswer | None:
    """Uses the reasoning as the text of an answer that has nothing else; None if it can't be.

    Reasoning that was cut off or not closed is no answer. If a format is required, only JSON that
    follows it is used, because other formats can't be checked.
    """
    reasoning = raw.reasoning.strip()
    meant_to_call = raw.attempted_call or any(each in reasoning for each in raw.call_delimiters)
    if not (allowed.mistakes and reasoning) or raw.reasoning_ran_out or meant_to_call:
        return None
    if required.format is None:
        if raw.is_unterminated:
            return None
        return CheckedAnswer(reasoning, (("reasoning", CONTENT),))
    if not isinstance(required.format, JsonFormat):
        return None
    found = _followed_schema(reasoning, required.format, allowed, check)
    if found.errors:
        return None
    return CheckedAnswer(found.text, (("reasoning", CONTENT), *found.repairs))


def _followed_schema(
    text: str, json: JsonFormat | None, allowed: RepairPolicy, check: Check
) -> CheckedAnswer:
    if json is None:
        return CheckedAnswer(text)
    found = json_text(text)
    if found is None or (found[1] and not allowed.mistakes):
        return CheckedAnswer(
            text, errors=("content: it is not one JSON value, each key once, and nothing else",)
        )
    inside, repairs = found
    try:
        errors = tuple(check(parsed(inside), json.schema))
    except CheckFailed:  # an answer that can't be checked is accepted
        errors = ()
    return CheckedAnswer(inside, tuple((kind, CONTENT) for kind in repairs), errors)


def _no_call(choice: ToolChoice) -> str:
    tool = f"the tool {choice.name}" if isinstance(choice, NamedTool) else "one of the tools"
    return f"tool_calls: {tool} has to be called, and none was"


def retry_message(errors: Sequence[str]) -> Message:
    """The message that shows the model its errors."""
    listed = "\n".join(f"- {error}" for error in errors)
    return Message(
        "user",
        f"Your answer is not what was asked for:\n{listed}\n"
        "Give the whole answer again with this put right, and nothing else: no apology, no "
        "explanation.",
    )


def retry_conversation(
    conversation: Conversation, text: str, errors: Sequence[str]
) -> Conversation:
    """The conversation with the rejected answer's text, if it has any, and the retry message."""
    answered = (Message("assistant", text),) if text else ()
    turns = (*answered, retry_message(errors))
    return replace(conversation, messages=(*conversation.messages, *turns))
