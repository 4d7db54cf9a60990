"""Renders a conversation to a prompt with the checkpoint's chat template."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Tool, ToolCall
from mlx_server.prompts.control_token_guard import ControlTokenGuard
from mlx_server.prompts.history_rendering import Escape, WriteCalls
from mlx_server.prompts.message_normalization import (
    REASONING_KEYS,
    CallId,
    TemplateCapabilities,
    Turn,
    arguments_object,
    fallbacks,
    fit_to_template,
    think_delimiters,
    to_turns,
)
from mlx_server.prompts.reasoning_effort import effort_word, switches, with_effort_word
from mlx_server.prompts.template_capabilities import template_capabilities
from mlx_server.request_threads import check_wanted
from mlx_server.templates.chat_template import ChatTemplate, RefusedByTemplate

Json = dict[str, Any]

NO_PARAMETERS: Json = {"type": "object", "properties": {}}

TOOLS_OF_SYSTEM = re.compile(r"message(?:\.tools\b|\[['\"]tools['\"]\])")


@dataclass(frozen=True)
class RenderedPrompt:
    tokens: list[int]
    ignored: tuple[str, ...] = ()
    """Names of the parameters that the request set and the template does not read."""
    messages: Callable[[], list[Json]] | None = None
    """Makes the prompt's messages as the family's own library has them, if there is one."""


def as_given(id: str, name: str, number: int) -> str:
    return id


@dataclass(frozen=True)
class RenderOptions:
    """The parts of rendering that a family's templates leave to the caller."""

    roles: dict[str, str]
    call_id: CallId
    write_calls: WriteCalls


def render_prompt(
    checkpoint: Checkpoint,
    conversation: Conversation,
    options: RenderOptions,
    most: int | None = None,
) -> RenderedPrompt:
    template = (conversation.tools and checkpoint.tool_template) or checkpoint.template
    if not template:
        raise BadRequest(
            "This model has no chat template. Use /v1/completions, or set `chat_template:` "
            "for it in models.yaml.",
            param="messages",
        )
    guard = ControlTokenGuard(checkpoint, conversation)
    text, ignored = _rendered(checkpoint, template, conversation, options, guard)
    return RenderedPrompt(guard.tokens(text, most), ignored)


def _rendered(
    checkpoint: Checkpoint,
    template: ChatTemplate,
    conversation: Conversation,
    options: RenderOptions,
    guard: ControlTokenGuard,
) -> tuple[str, tuple[str, ...]]:
    """The prompt as marked text, and the names of the ignored parameters."""
    kwargs = conversation.template_kwargs

    def takes(name: str) -> bool:
        return template.takes(name) and name not in checkpoint.tokens

    switched = switches(kwargs, takes)
    word = "" if switched else effort_word(kwargs, template.source)
    taken = [name for name in kwargs if takes(name)]
    tools = TemplateTools(template, conversation.tools, guard.escaped)
    messages = with_effort_word(conversation.messages, word) if word else conversation.messages
    capabilities = template_capabilities(template, checkpoint.tokens)
    delimiters = think_delimiters(template.source, capabilities)
    turns = to_turns(messages, options.roles, options.call_id, delimiters)
    keys = [key for key in REASONING_KEYS if key in template.source]

    def variables(m: TemplateCapabilities) -> Json:
        rendered = [
            message_json(turn, m, options, guard.escaped, keys)
            for turn in fit_to_template(turns, m)
        ]
        return {
            **checkpoint.tokens,
            **switched,
            **{name: guard.escaped(kwargs[name]) for name in taken},
            **tools.variables(rendered),
            "add_generation_prompt": True,
        }

    prompt = first_accepted(template, (partial(variables, m) for m in fallbacks(capabilities)))
    used = {*taken, *({"reasoning_effort"} if switched or word else ())}
    ignored = [f"chat_template_kwargs.{name}" for name in kwargs if name not in used]
    ignored += ["tools"] if tools.is_ignored else []
    return prompt, (*ignored, *dropped_text(conversation, capabilities))


def first_accepted(template: ChatTemplate, variants: Iterable[Callable[[], Json]]) -> str:
    """The prompt of the first variant that the template accepts; else raise the first refusal."""
    refusal: BadRequest | None = None
    for variables in variants:
        check_wanted()
        try:
            return template.render_made(variables)
        except RefusedByTemplate as error:
            refusal = refusal or error
    assert refusal
    raise refusal


def dropped_text(conversation: Conversation, capabilities: TemplateCapabilities) -> list[str]:
    """Paths of texts in turns with calls, if the template can render them nowhere."""
    messages = enumerate(conversation.messages) if capabilities.text_with_calls == "never" else ()
    return [f"messages[{i}].content" for i, m in messages if m.tool_calls and m.content]


@dataclass(frozen=True)
class TemplateTools:
    """Passes the tools to a template in the variable that it reads."""

    template: ChatTemplate
    tools: Sequence[Tool]
    escaped: Escape

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
        """`messages`, `tools`, and any other variable in which the template looks for tools."""
        tools = [tool_json(tool, self.escaped) for tool in self.tools]
        if tools and self._is_systems:
            messages = _in_the_systems(messages, tools)
        # SmolLM3's template takes any value of `xml_tools` for tools
        own = dict.fromkeys(self._names, tools) if tools else {}
        return {"messages": messages, "tools": None, **own}


def _in_the_systems(messages: list[Json], tools: list[Json]) -> list[Json]:
    """Put the tools into the system message, as text: Phi-4-mini's template reads them there."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    leads = bool(messages) and messages[0]["role"] == "system"
    system = messages[0] if leads else {"role": "system", "content": ""}
    return [{**system, "tools": text}, *messages[leads:]]


def message_json(
    turn: Turn,
    capabilities: TemplateCapabilities,
    options: RenderOptions,
    escaped: Escape,
    reasoning_keys: Sequence[str],
) -> Json:
    """The turn in the form that Hugging Face's templates read."""
    reasoning = escaped(turn.reasoning)
    optional = {
        "name": escaped(turn.name),
        "tool_calls": [call_json(call, capabilities, escaped) for call in turn.calls],
        "tool_call_id": escaped(turn.call_id),
        **(dict.fromkeys(reasoning_keys, reasoning) if capabilities.reasoning != "part" else {}),
    }
    content: Any = "".join(
        escaped(part) if isinstance(part, str) else options.write_calls(part, escaped)
        for part in turn.parts
    )
    if reasoning and capabilities.reasoning == "part":
        text = [{"type": "text", "text": content}] if content else []
        content = [{"type": "thinking", "thinking": reasoning}, *text]
    elif turn.calls and not content:
        content = capabilities.empty_content
    present = {key: value for key, value in optional.items() if value}
    return {"role": turn.role, "content": content, **present}


def call_json(call: ToolCall, capabilities: TemplateCapabilities, escaped: Escape) -> Json:
    arguments = (
        call.arguments if capabilities.arguments == "text" else arguments_object(call.arguments)
    )
    function = {"name": escaped(call.name), "arguments": escaped(arguments)}
    return {"id": escaped(call.id), "type": "function", "function": function}


def tool_json(tool: Tool, escaped: Escape) -> Json:
    # templates read these keys without a check that they exist
    absent = {key: value for key, value in NO_PARAMETERS.items() if key not in tool.parameters}
    function = {
        "name": escaped(tool.name),
        "description": escaped(tool.description or ""),
        "parameters": escaped({**tool.parameters, **absent}),
    }
    return {"type": "function", "function": function}
