"""Checkpoints whose prompts a template renders, and conversations for them."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from mlx_server.families import FAMILIES
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from tests.families import byte_level, checkpoint
from tests.families.prompts import template_of

EVERYTHING = """\
{{ greeting }}
{% for tool in tools or [] %}
<|im_start|>tool {{ tool.function.name }}: {{ tool.function.description }}
{{ tool.function.parameters | tojson }}
{% for key, value in tool.function.parameters.items() %}
{{ key }} is {{ value }}
{% endfor %}
<|im_end|>
{% endfor %}
{% for message in messages %}
<|im_start|>{{ message.role }} {{ message.name }} {{ message.tool_call_id }}
{{ message.reasoning_content }}
{{ message.content }}
{% for call in message.tool_calls or [] %}
{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}
{{ call.function.arguments }}
{% endfor %}
<|im_end|>
{% endfor %}
<|im_start|>assistant
"""


def said(text: str = "Hello", **more: Any) -> Conversation:
    return Conversation((Message("user", text, **more),))


def called(id: str = "1", name: str = "f", arguments: object = None) -> Conversation:
    call = ToolCall(id, name, json.dumps(arguments or {}))
    return Conversation((Message("assistant", tool_calls=(call,)),))


def offered(
    name: str = "f", description: str = "d", parameters: dict[str, Any] | None = None
) -> Conversation:
    tool = Tool(name, description, parameters or {})
    return Conversation((Message("user", "Hello"),), (tool,))


@lru_cache
def added_tokens(folder: Path) -> dict[int, str]:
    return {id: token.content for id, token in raw(folder).get_added_tokens_decoder().items()}


def control_tokens(prompted: Checkpoint, conversation: Conversation) -> list[str]:
    """The control tokens of the prompt, as they are spelled."""
    control = added_tokens(prompted.path)
    return [control[id] for id in PLAIN.render(prompted, conversation).tokens if id in control]


def text_of(prompted: Checkpoint, tokens: list[int]) -> str:
    return b"".join(map(prompted.tokenizer.bytes_of, tokens)).decode()


@lru_cache
def raw(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


EACH = "{% for m in messages %}"
ALL = "{% endfor %}<|im_end|>"
TEMPLATED = [family.name for family in FAMILIES if template_of(family.name).is_file()]
FUNCTION = '{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}'


def rendered_by(template: str, folder: Path, asked: Conversation) -> tuple[str, tuple[str, ...]]:
    prompted = checkpoint(folder, byte_level(), template)
    rendered = PLAIN.render(prompted, asked)
    return text_of(prompted, rendered.tokens), rendered.ignored


OFFERED = offered(description="")
