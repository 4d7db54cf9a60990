"""The grammar of gpt-oss's answers: messages on channels, as HarmonyParser reads them.

It covers the whole answer, so that every header is valid and names only available tools. A stop
token may end the answer wherever the grammar is complete.
"""

from collections.abc import Iterator

from mlx_server.engine.messages import Grammar
from mlx_server.errors import BadRequest
from mlx_server.grammars.formats import arguments, format_rule
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.parsers.harmony_parser import (
    FUNCTIONS,
    PYTHON,
    callable_tools,
    header_name,
    is_built_in,
)
from mlx_server.parsers.parse_context import OutputSpec
from mlx_server.requests import NamedTool
from mlx_server.tool_parsers.call_repair import match_tool_name

NEXT = "<|end|><|start|>assistant"
REASONING = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"

FUNCTION_CHANNELS = ("commentary",)
OWN_CHANNELS = ("analysis", "commentary")
"""Channels for calls of built-in tools."""


def grammar(spec: OutputSpec) -> Grammar | None:
    """Returns the grammar of an answer; None if any answer is valid."""
    if not (spec.format or spec.context.tools):
        return None
    return _Grammar(spec).source()


def end_of_reasoning(spec: OutputSpec) -> str:
    """Returns the text between reasoning and the answer, or a call if there can be one."""
    if spec.must_call:
        return "<|end|>"
    return NEXT if _may_call(spec) else NEXT + FINAL


def grammar_after_reasoning(spec: OutputSpec, constrains: bool) -> Grammar | None:
    """Returns the grammar of what follows reasoning that was ended: a call, a preamble or the final
    message, but no more reasoning; None if the grammar of the answer goes on.

    constrains: whether calls have to follow their tool's schema.
    """
    if not _may_call(spec):
        return None
    return _Grammar(spec).source_after_reasoning(constrains=constrains)


def _may_call(spec: OutputSpec) -> bool:
    """Whether the model may choose between a call and an answer."""
    return bool(spec.context.tools) and spec.choice == "auto"


class _Grammar:
    def __init__(self, spec: OutputSpec) -> None:
        self._spec = spec
        self._lark = Lark(spec.context.control)

    def source(self) -> Grammar:
        lark, calls = self._lark, list(self._calls())
        context = self._spec.context
        if context.continues and context.ends_with == FINAL:
            return lark.source(self._final_text())
        # the rest of a message that the prompt has begun
        rest = f"{lark.anything()} {lark.text(NEXT)} " if context.continues else ""
        if self._spec.must_call:
            if not calls:
                raise BadRequest(
                    "`tool_choice` requires a tool call, but Harmony can call none of the `tools`. "
                    "Check their names.",
                    param="tool_choice",
                )
            return lark.source(f"{rest}({self._message('analysis')})* ({' | '.join(calls)})")
        before = f"{self._message('analysis')} | {self._message('commentary')}"
        return lark.source(f"{rest}({before})* ({' | '.join([*calls, self._final()])})")

    def source_after_reasoning(self, *, constrains: bool) -> Grammar:
        calls = list(self._calls()) if constrains else [self._any_call()]
        answer = " | ".join([*calls, self._final()])
        return self._lark.source(f"({self._message('commentary')})* ({answer})")

    def _any_call(self) -> str:
        """Returns a call of any recipient with any arguments."""
        to = self._lark.rule('" to=" /[^\\s<]+/')
        return self._addressed(to, OWN_CHANNELS, self._lark.anything())

    def _message(self, channel: str) -> str:
        """Returns a message that is followed by another."""
        header = self._lark.text(f"<|channel|>{channel}<|message|>")
        return self._lark.rule(f"{header} {self._lark.anything()} {self._lark.text(NEXT)}")

    def _final(self) -> str:
        lark, format = self._lark, self._spec.format
        if not format:
            return lark.rule(f"{lark.text(FINAL)} {lark.anything()}")
        header = f"{lark.text('<|channel|>final')} {self._json_type()}? {lark.text('<|message|>')}"
        return lark.rule(f"{header} {self._final_text()}")

    def _final_text(self) -> str:
        format = self._spec.format
        return format_rule(format, self._lark) if format else self._lark.anything()

    def _calls(self) -> Iterator[str]:
        tools = self._spec.context.tools
        match self._spec.choice:
            case "none":
                return
            case NamedTool(name):
                chosen = [tool for tool in tools if tool.name == name]
            case _:
                chosen = list(tools)
        names = [tool.name for tool in tools]
        for tool in chosen:
            if is_built_in(tool):
                for own in callable_tools([tool]):
                    yield self._call(own.name, own, OWN_CHANNELS)
            elif (
                match_tool_name(recipient := FUNCTIONS + header_name(tool.name), names) == tool.name
            ):
                yield self._call(recipient, tool, FUNCTION_CHANNELS)

    def _call(self, recipient: str, tool: Tool, channels: tuple[str, ...]) -> str:
        to = self._lark.rule(quoted(f" to={recipient}"))
        return self._addressed(to, channels, self._arguments(tool))

    def _addressed(self, to: str, channels: tuple[str, ...], content: str) -> str:
        lark = self._lark
        channel = f"{lark.text('<|channel|>')} {lark.rule(' | '.join(map(quoted, channels)))}"
        # the recipient follows the channel or the role
        header = lark.rule(f"{channel} {to} | {to} {channel}")
        kind = lark.rule(f'{self._json_type()} | " json" | " code"')
        return lark.rule(f"{header} {kind}? {lark.text('<|message|>')} {content}")

    def _json_type(self) -> str:
        return self._lark.rule(f'" "? {self._lark.text("<|constrain|>json")}')

    def _arguments(self, tool: Tool) -> str:
        if is_built_in(tool) and tool.name == PYTHON:
            return self._lark.anything()
        return arguments(tool.parameters, self._lark, strict=tool.strict)


PREAMBLE = "<|channel|>commentary<|message|>"


def harmony_output(answer: Message) -> str:
    """Writes an answer's reasoning, text and calls as gpt-oss does."""
    text = f"{PREAMBLE if answer.tool_calls else FINAL}{answer.content}"
    messages = [
        *([f"{REASONING}{answer.reasoning}"] if answer.reasoning else ()),
        *([text] if answer.content else ()),
        *map(_call, answer.tool_calls),
    ]
    return NEXT.join(messages)


def _call(call: ToolCall) -> str:
    header = f"<|channel|>commentary to={FUNCTIONS}{header_name(call.name)} <|constrain|>json"
    return f"{header}<|message|>{call.arguments}"
