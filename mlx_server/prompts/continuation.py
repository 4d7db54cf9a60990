"""Prompts that end within an assistant's message, which the answer continues."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message
from mlx_server.prompts.control_token_guard import ControlTokenGuard
from mlx_server.system.sandbox.chat_template import RefusedByTemplate


class RenderMessages(Protocol):
    def __call__(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """Renders messages to marked text."""


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The text before and after reasoning, in which control tokens are control tokens."""

    opening: str
    closing: str


def continued_prompt(
    conversation: Conversation,
    render: RenderMessages,
    guard: ControlTokenGuard,
    reasoning: ReasoningText | None,
) -> str:
    """Returns the prompt, as marked text, up to the end of the last message's own text."""
    last, earlier = conversation.messages[-1], conversation.messages[:-1]
    end = guard.end_mark
    is_text = bool(last.content) or not last.reasoning
    begun = (
        replace(last, content=last.content + end)
        if is_text
        else replace(last, reasoning=f"{last.reasoning}{end}")
    )
    try:
        closed = render([*earlier, begun], generation_prompt=False)
    except RefusedByTemplate:
        closed = ""
    if end in closed:
        return closed[: closed.rindex(end)].replace(end, "")
    # the template refuses such a message, or leaves its reasoning out
    prompt = render(earlier)
    return prompt + _begun_answer(prompt, last, guard, reasoning)


def _begun_answer(
    prompt: str, last: Message, guard: ControlTokenGuard, reasoning: ReasoningText | None
) -> str:
    """Returns the beginning of the answer as the model writes it after the generation prompt."""
    text, thought = str(guard.escaped(last.content)), str(guard.escaped(last.reasoning or ""))
    if reasoning is None:
        return text
    is_open = prompt.rstrip().endswith(reasoning.opening.rstrip())
    opening = "" if is_open else reasoning.opening
    if thought and not text:
        return opening + thought
    closed = opening + thought + reasoning.closing if thought or is_open else ""
    return closed + text


def check_continued(conversation: Conversation, *, reasons: bool) -> None:
    """Raises BadRequest if the last message can't be continued. reasons: whether the model has
    delimiters of reasoning."""
    if not conversation.continue_final_message:
        return
    place = len(conversation.messages) - 1
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or last.role != "assistant":
        raise BadRequest(
            "`continue_final_message` (or `add_generation_prompt: false`) needs a last message "
            "with the role `assistant`, which the answer continues.",
            param=f"messages[{max(place, 0)}].role",
        )
    if last.tool_calls:
        raise BadRequest(
            "The last message has tool calls, so its text is complete and can't be continued. "
            "Send the results of the calls, or leave `continue_final_message` out.",
            param=f"messages[{place}].tool_calls",
        )
    if last.reasoning and not last.content and not reasons:
        raise BadRequest(
            "The last message has nothing but reasoning, which this model does not have, so it "
            "can't be continued. Give it `content`.",
            param=f"messages[{place}].reasoning_content",
        )


def with_open_reasoning(
    conversation: Conversation, pairs: Sequence[tuple[str, str]]
) -> Conversation:
    """Takes the text of the continued message as reasoning, if it opens reasoning and does not
    close it. pairs: the model's delimiters."""
    last = conversation.continued
    if last is None or last.reasoning:
        return conversation
    text = last.content.lstrip()
    for opening, closing in pairs:
        thought = text.removeprefix(opening.strip()).removeprefix("\n")
        if text.startswith(opening.strip()) and closing.strip() not in text and thought:
            message = replace(last, content="", reasoning=thought)
            return replace(conversation, messages=(*conversation.messages[:-1], message))
    return conversation
