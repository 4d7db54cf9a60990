"""Writes an answer as gpt-oss does: messages on channels, the final one or calls at the end."""

from mlx_server.messages import Message, ToolCall
from mlx_server.parsers.harmony.grammar import FINAL, NEXT, REASONING
from mlx_server.parsers.harmony.header import header_name
from mlx_server.parsers.harmony.parser import FUNCTIONS

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
