"""What becomes of an answer that is over and that no grammar held: taken as it is, mended, or
asked for once more. Nothing here is for answers that are what was asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.events import FinishReason, Mended
from mlx_server.messages import Conversation, Message
from mlx_server.repair.allowed import Repair
from mlx_server.repair.conforming import Unchecked, conforms
from mlx_server.repair.json_text import json_text, parsed
from mlx_server.requests import Format, JsonFormat, Named, ToolChoice

Check = Callable[[Any, Any], Sequence[str]]
"""As `conforms`: a value and its schema to what is wrong; may raise Unchecked."""

CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, all of it."""

    text: str = ""
    reasoning: str = ""
    calls: int = 0
    """Whole ones."""
    reason: FinishReason = "stop"
    ran_out: bool = False
    """Whether its reasoning was ended by its budget."""
    call_marks: tuple[str, ...] = ()
    """Those that open calls, where it was said."""


@dataclass(frozen=True, slots=True)
class Asked:
    format: Format | None = None
    choice: ToolChoice = "auto"


@dataclass(frozen=True, slots=True)
class Outcome:
    text: str
    repairs: tuple[tuple[Mended, str], ...] = ()
    """What was mended in it, and where; for `Repaired`."""
    errors: tuple[str, ...] = ()
    """Each as "path: what": why it should be asked for again, where that is allowed. If it can't
    be, the text counts all the same."""


def outcome(said: Said, asked: Asked, allowed: Repair, check: Check = conforms) -> Outcome:
    """May block for seconds where there is a schema to be followed."""
    json = asked.format if isinstance(asked.format, JsonFormat) else None
    if said.calls or said.reason == "length":
        return Outcome(said.text)
    if asked.choice == "required" or isinstance(asked.choice, Named):
        return Outcome(said.text, errors=(_no_call(asked.choice),))
    if said.text.strip():
        return _followed(said.text, json, allowed, check)
    found = _promoted(said, asked, allowed, check)
    return found or Outcome(said.text, errors=("content: there is no answer",) if json else ())


def _promoted(said: Said, asked: Asked, allowed: Repair, check: Check) -> Outcome | None:
    """The reasoning as the text, of an answer that ended by itself and holds nothing else: a
    piece of reasoning is no answer. Where the text has to follow a format, only JSON that does:
    nothing else can be checked."""
    reasoning = said.reasoning.strip()
    meant_to_call = any(mark in reasoning for mark in said.call_marks)
    if not (allowed.promote_reasoning and reasoning) or said.ran_out or meant_to_call:
        return None
    if asked.format is None:
        return Outcome(reasoning, (("reasoning", CONTENT),))
    if not isinstance(asked.format, JsonFormat):
        return None
    found = _followed(reasoning, asked.format, allowed, check)
    if found.errors:
        return None
    return Outcome(found.text, (("reasoning", CONTENT), *found.repairs))


def _followed(text: str, json: JsonFormat | None, allowed: Repair, check: Check) -> Outcome:
    if json is None:
        return Outcome(text)
    found = json_text(text)
    if found is None or (found[1] and not allowed.json):
        return Outcome(
            text, errors=("content: it is not one JSON value, each key once, and nothing else",)
        )
    inside, mended = found
    try:
        errors = tuple(check(parsed(inside), json.schema))
    except Unchecked:  # nobody can say that it is wrong
        errors = ()
    return Outcome(inside, tuple((what, CONTENT) for what in mended), errors)


def _no_call(choice: ToolChoice) -> str:
    tool = f"the tool {choice.name}" if isinstance(choice, Named) else "one of the tools"
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


def asked_again(conversation: Conversation, text: str, errors: Sequence[str]) -> Conversation:
    """The conversation that the model answers once more. text: what it answered, maybe nothing."""
    said = (Message("assistant", text),) if text else ()
    turns = (*said, retry_message(errors))
    return replace(conversation, messages=(*conversation.messages, *turns))
