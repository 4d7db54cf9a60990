"""Writes an answer as a family's models do, special tokens included, for replay models.

A written answer is used only if the family's parser reads the same answer from it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_server.errors import AnswerUnwritable
from mlx_server.events import Answer, folded
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import ParseContext


def write_answer(family: ModelFamily, tokenizer: Tokenizer, answer: Message) -> str:
    """The raw output from which the family's parser reads this reasoning, text and calls. Raises
    AnswerUnwritable if the family has no such output."""
    wanted = _parts(answer)
    for output in family.outputs(answer):
        read = _read(family, tokenizer, output, answer.tool_calls)
        if not read.repairs and _parts(read.message()) == wanted:
            return output
    raise AnswerUnwritable(_reason(family, answer))


def _parts(answer: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """The reasoning, the text, and each call's name and parsed arguments."""
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    return (answer.reasoning or "").strip(), answer.content.strip(), calls


def _read(
    family: ModelFamily, tokenizer: Tokenizer, output: str, calls: Sequence[ToolCall]
) -> Answer:
    offered = tuple(Tool(name, None, _argument_schema(calls, name)) for name in _tool_names(calls))
    parser = family.make_parser(ParseContext(tools=offered, control=tokenizer.control_tokens))
    text = tokenizer.detokenizer()
    events = [event for id in tokenizer.encode(output) for event in parser.feed(id, text.feed(id))]
    return folded([*events, *parser.finish(cut=False)])


def _tool_names(calls: Sequence[ToolCall]) -> Iterable[str]:
    return dict.fromkeys(call.name for call in calls)


def _argument_schema(calls: Sequence[ToolCall], name: str) -> dict[str, Any]:
    """A schema for the tool that allows the arguments of all its calls, with which the parser can
    tell their types."""
    values: dict[str, list[Any]] = {}
    for call in calls:
        if call.name == name:
            for key, value in json.loads(call.arguments).items():
                values.setdefault(key, []).append(value)
    return {"type": "object", "properties": {key: {"enum": v} for key, v in values.items()}}


def _reason(family: ModelFamily, answer: Message) -> str:
    what = "this answer as a whole"
    if answer.tool_calls and not family.has_calls:
        what = "calls of tools"
    elif answer.reasoning and not (family.shapes[0] or family.layout_with().reasoning):
        what = "thoughts"
    return (
        f"The family {family.name} has no way to write {what}. Choose another family, or give the "
        "model's raw output."
    )
