"""Adds tools and schemas to the system prompt, for templates that have no place for them.

The text depends on nothing but the tools and the schema, and follows the client's own system
prompt: it is the same in every turn of a conversation, so that the prompt cache can serve it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_server.grammars.view import named
from mlx_server.messages import Tool
from mlx_server.prompts.message_normalization import OwnText, Part, Turn

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

BEFORE_TOOLS = OwnText("""\
# Tools

You can call these functions. Each line between <tools> and </tools> describes one:
<tools>
""")

AFTER_TOOLS = OwnText("""
</tools>

To call a function, write its name and its arguments as one JSON object between <tool_call> and \
</tool_call>, and several of these for several calls:
<tool_call>
{"name": "the function", "arguments": {"its parameter": "a value"}}
</tool_call>
What a function returns is given to you between <tool_response> and </tool_response>. Call a \
function where you need what it returns or does; otherwise answer in words.""")

ONE_OF = OwnText("Answer the question correctly, with one of these texts and nothing else: ")
MATCHING = OwnText(
    "Answer the question correctly, with a text that this regular expression matches and nothing "
    "else: "
)

SEPARATOR, COLON = OwnText("\n\n"), OwnText(":\n")


def function_json(tool: Tool) -> dict[str, Any]:
    # templates read these keys without a check that they exist
    absent = {key: value for key, value in NO_PARAMETERS.items() if key not in tool.parameters}
    return {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": {**tool.parameters, **absent},
    }


def tools_text(tools: Iterable[Tool]) -> list[Part]:
    """Describes the tools as Hermes models are given them, and how to call them."""
    lines = (_json({"type": "function", "function": function_json(tool)}) for tool in tools)
    return [BEFORE_TOOLS, "\n".join(lines), AFTER_TOOLS]


def format_text(wanted: Mapping[str, Any]) -> list[Part]:
    """Describes a `Conversation.response_format` as an instruction."""
    return _schema_text(wanted) if "schema" in wanted else list(format_line(wanted))


def format_line(wanted: Mapping[str, Any]) -> tuple[OwnText, str]:
    """Returns the instruction for an answer that is not JSON, and the format that the client asked
    for."""
    if "choice" in wanted:
        return ONE_OF, _json(wanted["choice"])
    return MATCHING, wanted["regex"]


def _schema_text(wanted: Mapping[str, Any]) -> list[Part]:
    schema = wanted.get("schema")
    if schema in (True, {}, {"type": "object"}):
        return [OwnText("Answer the question correctly, as a JSON object.")]
    description = wanted.get("description")
    about: list[Part] = [OwnText(" ("), description.strip(), OwnText(")")] if description else []
    is_object = isinstance(schema, Mapping) and named(schema) == {"object"}
    form = "a JSON object" if is_object else "JSON"
    begin = OwnText(f"Answer the question correctly, as {form} of this JSON Schema")
    return [begin, *about, COLON, _json(schema)]


def with_system_text(
    turns: Sequence[Turn], added: Sequence[Part], default: Callable[[], str]
) -> list[Turn]:
    """Appends to the leading system turns; `default` makes the text of a missing one."""
    leading = next((i for i, turn in enumerate(turns) if not _is_system(turn)), len(turns))
    if leading:
        last = turns[leading - 1]
        separator = [SEPARATOR] if any(last.parts) else []
        extended = replace(last, parts=(*last.parts, *separator, *added))
        return [*turns[: leading - 1], extended, *turns[leading:]]
    text = default()
    before = [OwnText(text), SEPARATOR] if text else []
    return [Turn("system", (*before, *added)), *turns]


def with_question_text(turns: Sequence[Turn], added: Sequence[Part]) -> list[Turn]:
    """Puts the text before the first user's, for templates that move the system turn to the last
    question, where it would be at another place in every prompt."""
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return with_system_text(turns, added, str)
    asked = replace(turns[first], parts=(*added, SEPARATOR, *turns[first].parts))
    return [*turns[:first], asked, *turns[first + 1 :]]


def joined(*texts: Sequence[Part]) -> list[Part]:
    """Joins the texts that are not empty, as one paragraph each."""
    found: list[Part] = []
    for text in texts:
        found += [SEPARATOR, *text] if found and text else text
    return found


def _is_system(turn: Turn) -> bool:
    return turn.role in ("system", "developer")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
