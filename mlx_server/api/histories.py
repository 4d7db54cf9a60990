"""Reads a history: the messages or items that a client sends again with every request.

Other servers and older clients wrote some of them. What is wrong in one is left out and reported as
ignored, because a refusal would end the conversation: its next request has the same history.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from mlx_server.api.fields import MendedItems
from mlx_server.http.errors import problem_of
from mlx_server.messages import ContentPart, Message, Phase, ToolCall, media_parts

WITHOUT_MENDING: Final[Mapping[str, bool]] = {"mends_histories": False}
"""The context of a validation that refuses what is wrong, and so is short."""

MENDS_OF_ITEM = 64
"""After them, what is wrong takes its whole field with it, of which an item has few."""
MOST_FIELDS = 16
MENDS = 4096
"""A history with more of them is refused: each takes a validation of its item."""


def _readable(value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    try:
        return validate(value)
    except ValidationError:
        if not isinstance(value, list) or info.context == WITHOUT_MENDING:
            raise
        items: list[Any] = []
        unread: list[str] = []
        for item in value:
            if len(unread) < MENDS:
                items += _mended(item, validate, unread)
        if not items or len(unread) >= MENDS:
            raise
        return MendedItems(validate(items), dict.fromkeys(unread))


MENDED = WrapValidator(_readable)


def _mended(item: Any, validate: ValidatorFunctionWrapHandler, unread: list[str]) -> list[Any]:
    """The validated item without what is wrong in it, whose paths are added to `unread`; an empty
    list if nothing of the item can be read."""
    if isinstance(item, str | list):  # a text without the object around it
        item = {"role": "user", "content": item}
    for mends in range(MENDS_OF_ITEM + MOST_FIELDS if item is not None else 0):
        try:
            validated: list[Any] = validate([item])
            return validated
        except ValidationError as error:
            (_, *loc), problem = problem_of(error, [item])
        if problem["type"] == "missing":  # the object has to go that lacks the field
            loc.pop()
        if not loc:
            break
        is_list = problem["type"] == "list_type"
        if mends >= MENDS_OF_ITEM:
            loc, is_list = loc[:1], False
        item, is_whole = _mended_at(item, loc, is_list)
        if not is_whole:
            unread.append(".".join(part for part in loc if isinstance(part, str)))
    unread.append("")
    return []


def _mended_at(node: Any, loc: Sequence[int | str], is_list: bool) -> tuple[Any, bool]:
    """A copy of the node without the value at `loc`, or with it in a list where it should be one;
    and whether it still has it."""
    head, *rest = loc
    copy: Any = node.copy()
    is_whole = False
    if rest:
        copy[head], is_whole = _mended_at(node[head], rest, is_list)
    elif is_list and node[head] is not None:
        copy[head], is_whole = [node[head]], True
    else:
        del copy[head]
    return copy, is_whole


def with_answered_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages, of which each result has the id of its call. Older clients and most of Ollama's
    send no id with a result: it then answers the next call of its name, or without a name the
    next."""
    unanswered: set[str] = set()
    waiting = defaultdict[str | None, deque[str]](deque)
    """The ids by name, and all under None; those that are answered are skipped later."""
    for message in messages:
        if message.role == "assistant":
            unanswered = {call.id for call in message.tool_calls}
            waiting.clear()
            for call in message.tool_calls:
                waiting[call.name].append(call.id)
                waiting[None].append(call.id)
        elif message.role == "tool":
            id = message.tool_call_id or None
            while id is None and waiting[message.name]:
                first = waiting[message.name].popleft()
                id = first if first in unanswered else None
            unanswered.discard(id or "")
            message = replace(message, tool_call_id=id)
        yield message


@dataclass
class AssistantDraft:
    """A text of the assistant, and the reasoning before it."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """In lines of their own."""
    phase: Phase | None = None
    parts: tuple[ContentPart, ...] = ()


def assistant_messages(
    drafts: Sequence[AssistantDraft], calls: tuple[ToolCall, ...]
) -> list[Message]:
    """The messages of a turn. Results must directly follow their calls, so that a turn with calls
    is one message."""
    return [
        Message(
            "assistant",
            "\n".join(draft.texts),
            reasoning="\n\n".join(draft.reasoning) or None,
            tool_calls=calls,
            phase=draft.phase,
            parts=draft.parts,
        )
        for draft in ([_merged(drafts)] if calls else drafts)
    ]


def _merged(drafts: Sequence[AssistantDraft]) -> AssistantDraft:
    texts = [("\n".join(draft.texts), draft.phase) for draft in drafts if any(draft.texts)]
    phases = {phase for _, phase in texts}
    return AssistantDraft(
        parts=media_parts([part for draft in drafts for part in draft.parts]),
        reasoning=[text for draft in drafts for text in draft.reasoning],
        texts=["\n\n".join(text for text, _ in texts)],
        phase=phases.pop() if len(phases) == 1 else None,
    )
