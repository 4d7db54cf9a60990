"""Writes an answer as a family's models do, special tokens included, for replay models.

Calls come from the family's own grammar: a schema that allows nothing but these arguments leaves
one text. What was written is read by the family's parser, and counts only if it finds the answer.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import AnswerUnwritable, InvalidGrammar
from mlx_server.events import (
    Event,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.families.base import ModelFamily
from mlx_server.grammars.first_text import control_ids, first_text
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers.call_format import BlockGrammar, UnmarkedBlockGrammar
from mlx_server.tool_parsers.parameters import UncallableTool


def write_answer(family: ModelFamily, tokenizer: Tokenizer, answer: Message) -> str:
    """The raw output of which the family's parser makes this reasoning, text and calls, in this
    order. Raises AnswerUnwritable."""
    wanted = _AnswerParts.of_message(answer)
    for output in _outputs(family, answer):
        if _read(family, tokenizer, output, answer.tool_calls) == wanted:
            return output
    raise AnswerUnwritable(_reason(family, answer))


@dataclass(frozen=True)
class _AnswerParts:
    reasoning: str
    text: str
    calls: list[tuple[str, Any]]
    """The name and the arguments of each call."""
    repairs: int = 0

    @classmethod
    def of_message(cls, answer: Message) -> "_AnswerParts":
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        return cls((answer.reasoning or "").strip(), answer.content.strip(), calls)

    @classmethod
    def of_events(cls, events: Sequence[Event]) -> "_AnswerParts":
        names = {event.call: event.name for event in events if isinstance(event, ToolCallStarted)}
        texts = dict.fromkeys(names, "")
        for event in events:
            if isinstance(event, ToolCallDelta):
                texts[event.call] += event.arguments
        finished = [event.call for event in events if isinstance(event, ToolCallFinished)]
        return cls(
            "".join(e.separated for e in events if isinstance(e, ReasoningDelta)).strip(),
            "".join(e.separated for e in events if isinstance(e, TextDelta)).strip(),
            [(names[call], json.loads(texts[call])) for call in sorted(finished)],
            sum(isinstance(event, Repaired) for event in events),
        )


def _read(
    family: ModelFamily, tokenizer: Tokenizer, output: str, calls: Sequence[ToolCall]
) -> _AnswerParts:
    offered = tuple(Tool(name, None, _any_of(calls, name)) for name in _names(calls))
    parser = family.make_parser(ParseContext(tools=offered, control=tokenizer.control_tokens))
    text = tokenizer.detokenizer()
    events = [event for id in tokenizer.encode(output) for event in parser.feed(id, text.feed(id))]
    return _AnswerParts.of_events([*events, *parser.finish(text.finish(), cut=False)])


def _names(calls: Sequence[ToolCall]) -> Iterable[str]:
    return dict.fromkeys(call.name for call in calls)


def _any_of(calls: Sequence[ToolCall], name: str) -> dict[str, Any]:
    """A schema that allows the arguments of all calls of this tool."""
    values: dict[str, list[Any]] = {}
    for call in calls:
        if call.name == name:
            for key, value in json.loads(call.arguments).items():
                values.setdefault(key, []).append(value)
    return {"type": "object", "properties": {key: {"enum": v} for key, v in values.items()}}


def _outputs(family: ModelFamily, answer: Message) -> Iterator[str]:
    """Candidates, the likeliest first."""
    if family.overrides:
        yield family.overrides.write(answer)
        return
    blocks = list(_blocks(family, answer.tool_calls)) if answer.tool_calls else [""]
    for block in blocks:
        for thought in _thoughts(family, answer):
            yield f"{thought}{answer.content}{block}"


def _thoughts(family: ModelFamily, answer: Message) -> Iterator[str]:
    if not answer.reasoning:
        yield ""
        return
    prefix = family.answer_prefix
    gap = "\n" if prefix.startswith("\n") else ""
    for opening, closing in family.layout_with().reasoning:
        begun = f"{opening}{gap}{answer.reasoning}"
        if answer.content or closing not in prefix:
            yield f"{begun}{prefix or closing}"
        yield f"{begun}{gap}{closing}{gap * 2}"


def _blocks(family: ModelFamily, calls: Sequence[ToolCall]) -> Iterator[str]:
    """All calls, in each of the family's formats."""
    tools = [Tool(call.name, None, _only(json.loads(call.arguments))) for call in calls]
    for call_format in family.layout_with(tools).call_formats:
        for block in call_format.blocks:
            opens = "" if isinstance(block, UnmarkedBlockGrammar) else call_format.opens[0]
            try:
                yield _block(family, opens, block, tools)
            except (UncallableTool, InvalidGrammar):
                continue  # this format can't express one of the calls


def _only(arguments: dict[str, Any]) -> dict[str, Any]:
    """A schema that allows these arguments alone."""
    return {
        "type": "object",
        "properties": {key: {"const": value} for key, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }


def _block(family: ModelFamily, opens: str, block: BlockGrammar, tools: Sequence[Tool]) -> str:
    first, *others = tools
    calls = [_first_call(family, block, first), *(_call(family, block, tool) for tool in others)]
    after = block.after if isinstance(block.after, str) else "".join(block.after)
    if block.between is None:
        return "".join(f"{opens}{block.before}{call}{after}" for call in calls)
    return f"{opens}{block.before}{block.between.join(calls)}{after}"


def _first_call(family: ModelFamily, block: BlockGrammar, tool: Tool) -> str:
    if not isinstance(block, UnmarkedBlockGrammar):
        return _call(family, block, tool)
    lark = Lark(control_ids(family.special_tokens))
    whole = f"{lark.terminal(f'/{block.head(tool)}/')} {block.rest(lark, tool)}"
    return first_text(lark.source(whole), family.special_tokens)


def _call(family: ModelFamily, block: BlockGrammar, tool: Tool) -> str:
    lark = Lark(control_ids(family.special_tokens))
    return first_text(lark.source(block.call(lark, tool)), family.special_tokens)


def _reason(family: ModelFamily, answer: Message) -> str:
    layout = family.layout_with([Tool(call.name) for call in answer.tool_calls])
    what = "this answer as a whole"
    if answer.tool_calls and not (family.overrides or layout.call_formats):
        what = "calls of tools"
    elif answer.reasoning and not (family.overrides or layout.reasoning):
        what = "thoughts"
    return (
        f"The family {family.name} has no way to write {what}. Choose another family, or give the "
        "model's raw output."
    )
