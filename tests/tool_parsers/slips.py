"""Calls of a shell command, as each family writes them."""

from collections.abc import Callable, Sequence

from mlx_server.events import Event
from mlx_server.families import family_named
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext
from tests.families.goldens import NO_TOKEN, Reads, folded

BASH = Tool(
    "bash",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
)


def read(
    family: str,
    output: str,
    size: int = 10_000,
    *,
    offered: Sequence[Tool] = (BASH,),
    cut: bool = False,
    holds_calls: bool = False,
) -> Reads:
    context = ParseContext(tools=tuple(offered), holds_calls=holds_calls)
    parser = family_named(family).make_parser(context)
    pieces = [output[at : at + size] for at in range(0, len(output), size)]
    events: list[Event] = [event for text in pieces for event in parser.feed(NO_TOKEN, text)]
    return folded([*events, *parser.finish(cut=cut)], offered)


def hermes(quote: str, text: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{text}"}}}}\n</tool_call>'


def llama(quote: str, text: str) -> str:
    return f'{{"name": "bash", "parameters": {{"command": "{text}"}}}}'


def mistral(quote: str, text: str) -> str:
    return f'[TOOL_CALLS]bash[ARGS]{{"command": "{text}"}}'


def kimi(quote: str, text: str) -> str:
    return (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        f'<|tool_call_argument_begin|>{{"command": "{text}"}}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def lfm2(quote: str, text: str) -> str:
    return f"<|tool_call_start|>[bash(command={quote}{text}{quote})]<|tool_call_end|>"


def olmo3(quote: str, text: str) -> str:
    return f"<function_calls>bash(command={quote}{text}{quote}, timeout=3)</function_calls>"


def gemma4(quote: str, text: str) -> str:
    return f"<|tool_call>call:bash{{command:{quote}{text}{quote}}}<tool_call|>"


WRITERS: dict[str, Callable[[str, str], str]] = {
    "qwen3": hermes,
    "llama3": llama,
    "mistral": mistral,
    "kimi_k2": kimi,
    "lfm2": lfm2,
    "olmo3": olmo3,
    "gemma4": gemma4,
}
