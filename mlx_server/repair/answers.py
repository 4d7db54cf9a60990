"""What becomes of an answer that is over and that no grammar held: taken as it is, mended, or
asked for once more. Nothing here is for answers that are what was asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.events import FinishReason, RepairKind
from mlx_server.messages import Conversation, Message
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.conforming import CheckFailed, schema_errors
from mlx_server.repair.json_text import json_text, parsed
from mlx_server.requests import Format, JsonFormat, NamedTool, ToolChoice

Check = Callable[[Any, Any], Sequence[str]]
"""As `conforms`: a value and its schema to what is wrong; may raise Unchecked."""

CONTENT = "content"


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer, all of it."""

    text: str = ""
    reasoning: str = ""
    calls: int = 0
    """Whole ones."""
    reason: FinishReason = "stop"
    reasoning_ran_out: bool = False
    """Whether its reasoning was ended by its budget."""
    call_delimiters: tuple[str, ...] = ()
    """Those that open calls, where it was said."""


@dataclass(frozen=True, slots=True)
class Requirements:
    format: Format | None = None
    choice: ToolChoice = "auto"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    text: str
    repairs: tuple[tuple[RepairKind, str], ...] = ()
    """What was mended in it, and where; for `Repaired`."""
    errors: tuple[str, ...] = ()
    """Each as "path: what": why it should be asked for again, where that is allowed. If it can't
    be, the text counts all the same."""


def check_answer(
    raw: RawAnswer, required: Requirements, allowed: RepairPolicy, check: Check = schema_errors
) -> CheckedAnswer:
    """May block for seconds where there is a schema to be followed."""
    json = required.format if isinstance(required.format, JsonFormat) else None
    if raw.calls or raw.reason == "length":
        return CheckedAnswer(raw.text)
    if required.choice == "required" or isinstance(required.choice, NamedTool):
        return CheckedAnswer(raw.text, errors=(_no_call(required.choice),))
    if raw.text.strip():
        return _followed_schema(raw.text, json, allowed, check)
    found = _promoted(raw, required, allowed, check)
    return found or CheckedAnswer(raw.text, errors=("content: there is no answer",) if json else ())


def _promoted(
    raw: RawAnswer, required: Requirements, allowed: RepairPolicy, check: Check
) -> CheckedAnswer | None:
    """The reasoning as the text, of an answer that ended by itself and holds nothing else: a
    piece of reasoning is no answer. Where the text has to follow a format, only JSON that does:
    nothing else can be checked."""
    reasoning = raw.reasoning.strip()
    meant_to_call = any(mark in reasoning for mark in raw.call_delimiters)
    if not (allowed.promote_reasoning and reasoning) or raw.reasoning_ran_out or meant_to_call:
        return None
    if required.format is None:
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
    if found is None or (found[1] and not allowed.json):
        return CheckedAnswer(
            text, errors=("content: it is not one JSON value, each key once, and nothing else",)
        )
    inside, mended = found
    try:
        errors = tuple(check(parsed(inside), json.schema))
    except CheckFailed:  # nobody can say that it is wrong
        errors = ()
    return CheckedAnswer(inside, tuple((what, CONTENT) for what in mended), errors)


def _no_call(choice: ToolChoice) -> str:
    tool = f"the tool {choice.name}" if isinstance(choice, NamedTool) else "one of the tools"
    return f"tool_calls: {tool} has to be called, and none was"


def retry_message(errors: Sequence[str]) -> Message:
    """What the model is shown of its mistakes."""
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
    """The conversation that the model answers once more. text: what it answered, maybe nothing."""
    said = (Message("assistant", text),) if text else ()
    turns = (*said, retry_message(errors))
    return replace(conversation, messages=(*conversation.messages, *turns))
