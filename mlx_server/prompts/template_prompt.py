"""A conversation to a prompt, by the checkpoint's own chat template."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Tool, ToolCall
from mlx_server.prompts.control_token_guard import Seal
from mlx_server.prompts.history_rendering import Close, WriteCalls
from mlx_server.prompts.message_normalization import (
    REASONING_KEYS,
    CallId,
    Manners,
    Turn,
    plainer_and_plainer,
    shaped,
    think_marks,
    turns_of,
    value_of,
)
from mlx_server.prompts.reasoning_effort import switches, with_word, word_for
from mlx_server.prompts.template_capabilities import manners_of
from mlx_server.request_threads import check_wanted
from mlx_server.templates.chat_template import ChatTemplate, RefusedByTemplate

Json = dict[str, Any]

NO_PARAMETERS: Json = {"type": "object", "properties": {}}

TOOLS_OF_SYSTEM = re.compile(r"message(?:\.tools\b|\[['\"]tools['\"]\])")


@dataclass(frozen=True)
class Rendered:
    tokens: list[int]
    ignored: tuple[str, ...] = ()
    """What the conversation set that this template has no place for, by parameter name."""
    messages: Callable[[], list[Json]] | None = None
    """The same in the words of the family's own library, if it has one."""


def as_given(id: str, name: str, number: int) -> str:
    return id


@dataclass(frozen=True)
class Wording:
    """What a family's templates leave to whoever calls them."""

    roles: dict[str, str]
    call_id: CallId
    write_calls: WriteCalls


def prompt_of(
    checkpoint: Checkpoint,
    conversation: Conversation,
    wording: Wording,
    most: int | None = None,
) -> Rendered:
    template = (conversation.tools and checkpoint.tool_template) or checkpoint.template
    if not template:
        raise BadRequest(
            "This model has no chat template. Use /v1/completions, or set `chat_template:` "
            "for it in models.yaml.",
            param="messages",
        )
    seal = Seal(checkpoint, conversation)
    text, ignored = _rendered(checkpoint, template, conversation, wording, seal)
    return Rendered(seal.tokens(text, most), ignored)


def _rendered(
    checkpoint: Checkpoint,
    template: ChatTemplate,
    conversation: Conversation,
    wording: Wording,
    seal: Seal,
) -> tuple[str, tuple[str, ...]]:
    """The prompt as marked text, and what is ignored."""
    asked = conversation.template_kwargs

    def takes(name: str) -> bool:
        return template.takes(name) and name not in checkpoint.tokens

    switched = switches(asked, takes)
    word = "" if switched else word_for(asked, template.source)
    taken = [name for name in asked if takes(name)]
    offer = Offer(template, conversation.tools, seal.closed)
    messages = with_word(conversation.messages, word) if word else conversation.messages
    manners = manners_of(template, checkpoint.tokens)
    marks = think_marks(template.source, manners)
    turns = turns_of(messages, wording.roles, wording.call_id, marks)
    keys = [key for key in REASONING_KEYS if key in template.source]

    def variables(m: Manners) -> Json:
        written = [message_json(turn, m, wording, seal.closed, keys) for turn in shaped(turns, m)]
        return {
            **checkpoint.tokens,
            **switched,
            **{name: seal.closed(asked[name]) for name in taken},
            **offer.variables(written),
            "add_generation_prompt": True,
        }

    prompt = first_taken(template, (partial(variables, m) for m in plainer_and_plainer(manners)))
    heeded = {*taken, *({"reasoning_effort"} if switched or word else ())}
    ignored = [f"chat_template_kwargs.{name}" for name in asked if name not in heeded]
    ignored += ["tools"] if offer.is_ignored else []
    return prompt, (*ignored, *unheard(conversation, manners))


def first_taken(template: ChatTemplate, variants: Iterable[Callable[[], Json]]) -> str:
    """The last of these is the plainest; the first refusal is the one to report."""
    refusal: BadRequest | None = None
    for variables in variants:
        check_wanted()
        try:
            return template.render_made(variables)
        except RefusedByTemplate as error:
            refusal = refusal or error
    assert refusal
    raise refusal


def unheard(conversation: Conversation, manners: Manners) -> list[str]:
    """The text beside calls, where a template leaves it out and has no other place for it."""
    messages = enumerate(conversation.messages) if manners.beside == "never" else ()
    return [f"messages[{i}].content" for i, m in messages if m.tool_calls and m.content]


@dataclass(frozen=True)
class Offer:
    """Where a template looks for the tools."""

    template: ChatTemplate
    tools: Sequence[Tool]
    closed: Close

    @property
    def _names(self) -> list[str]:
        return [name for name in ("tools", "xml_tools") if name in self.template.reads]

    @property
    def _is_systems(self) -> bool:
        return not self._names and bool(TOOLS_OF_SYSTEM.search(self.template.source))

    @property
    def is_ignored(self) -> bool:
        return bool(self.tools) and not self._names and not self._is_systems

    def variables(self, messages: list[Json]) -> Json:
        """`messages` and `tools`, and what else the template calls the tools."""
        tools = [tool_json(tool, self.closed) for tool in self.tools]
        if tools and self._is_systems:
            messages = _in_the_systems(messages, tools)
        # SmolLM3's template takes any `xml_tools` for tools
        own = dict.fromkeys(self._names, tools) if tools else {}
        return {"messages": messages, "tools": None, **own}


def _in_the_systems(messages: list[Json], tools: list[Json]) -> list[Json]:
    """As Phi-4-mini's template has tools: in the system's message, as text."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    leads = bool(messages) and messages[0]["role"] == "system"
    system = messages[0] if leads else {"role": "system", "content": ""}
    return [{**system, "tools": text}, *messages[leads:]]


def message_json(
    turn: Turn, manners: Manners, wording: Wording, closed: Close, reasoning_keys: Sequence[str]
) -> Json:
    """As Hugging Face's templates read it."""
    reasoning = closed(turn.reasoning)
    optional = {
        "name": closed(turn.name),
        "tool_calls": [call_json(call, manners, closed) for call in turn.calls],
        "tool_call_id": closed(turn.call_id),
        **(dict.fromkeys(reasoning_keys, reasoning) if manners.reasoning != "part" else {}),
    }
    content: Any = "".join(
        closed(part) if isinstance(part, str) else wording.write_calls(part, closed)
        for part in turn.parts
    )
    if reasoning and manners.reasoning == "part":
        text = [{"type": "text", "text": content}] if content else []
        content = [{"type": "thinking", "thinking": reasoning}, *text]
    elif turn.calls and not content:
        content = manners.silence
    present = {key: value for key, value in optional.items() if value}
    return {"role": turn.role, "content": content, **present}


def call_json(call: ToolCall, manners: Manners, closed: Close) -> Json:
    arguments = call.arguments if manners.arguments == "text" else value_of(call.arguments)
    function = {"name": closed(call.name), "arguments": closed(arguments)}
    return {"id": closed(call.id), "type": "function", "function": function}


def tool_json(tool: Tool, closed: Close) -> Json:
    # templates look for these without asking whether they are there
    absent = {key: value for key, value in NO_PARAMETERS.items() if key not in tool.parameters}
    function = {
        "name": closed(tool.name),
        "description": closed(tool.description or ""),
        "parameters": closed({**tool.parameters, **absent}),
    }
    return {"type": "function", "function": function}
