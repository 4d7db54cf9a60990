"""Blocks of calls in a grammar (see `BlockGrammar`)."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from mlx_server.grammars.lark import Lark
from mlx_server.grammars.schema import unenforced
from mlx_server.messages import Tool
from mlx_server.schemas.members import object_of
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, UnmarkedBlockGrammar
from mlx_server.tool_parsers.parameters import UncallableTool

T = TypeVar("T")


def block_rule(block: BlockGrammar, lark: Lark, tools: Sequence[Tool], *, several: bool) -> str:
    """Returns the rule of a block after its opening delimiter. several: whether it may have more
    than one call, if its format allows that."""
    refuse_unsupported(block, tools)
    call = one_of(writable(lambda tool: block.call(lark, tool), tools))
    begin = [lark.text(block.before)] if block.before else []
    calls = f"({call}) {_more(block, lark, call) if several else ''}"
    return lark.rule(_spaced(block, lark, ["", *begin, calls, *_after(block, lark)]))


def unmarked_block_rule(
    block: UnmarkedBlockGrammar,
    lark: Lark,
    tools: Sequence[Tool],
    *,
    several: bool,
    space: str = "",
) -> str:
    """Returns the rule of the whole block. space: what may be before it, as a regular
    expression."""

    def first(tool: Tool) -> str:
        return f"{lark.terminal(f'/{space}{block.head(tool)}/')} {block.rest(lark, tool)}"

    refuse_unsupported(block, tools)
    call = one_of(writable(lambda tool: block.call(lark, tool), tools))
    firsts = one_of(writable(first, tools))
    calls = f"({firsts}) {_more(block, lark, call) if several else ''}"
    return lark.rule(_spaced(block, lark, [calls, *_after(block, lark)]))


def empty_block(block: BlockGrammar, lark: Lark) -> str:
    begin = [lark.text(block.before)] if block.before else []
    return lark.rule(_spaced(block, lark, ["", *begin, *_after(block, lark)]))


def refuse_unsupported(block: BlockGrammar, tools: Sequence[Tool]) -> None:
    """Raises InvalidGrammar for a strict tool if the block's grammar does not enforce its
    schema."""
    for gap in (gap for tool in tools if tool.strict for gap in block.unsupported(tool)):
        refusal = gap.refusal()
        refusal.param = "tools"
        raise refusal


def unsupported_keywords(call_formats: Sequence[CallFormat], tool: Tool) -> tuple[str, ...]:
    """Returns `keyword at #/path` for all keywords that some format of the tool's calls does not
    enforce."""
    blocks = (block for each in call_formats for block in each.blocks)
    unsupported = (str(each) for block in blocks for each in block.unsupported(tool))
    return tuple(dict.fromkeys([*unenforced(object_of(tool.parameters)), *unsupported]))


def writable(write: Callable[[T], str], each: Sequence[T]) -> list[str]:
    """Writes each tool or block that can be written; raises UncallableTool if none can."""
    written: list[str] = []
    refused: UncallableTool | None = None
    for one in each:
        try:
            written.append(write(one))
        except UncallableTool as error:
            refused = error
    if refused and not written:
        raise refused
    return written


def one_of(symbols: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(symbols))


def _more(block: BlockGrammar, lark: Lark, call: str) -> str:
    if block.between is None:
        return ""
    between = [lark.text(block.between)] if block.between else []
    return f"({_spaced(block, lark, ['', *between, f'({call})'])})*"


def _after(block: BlockGrammar, lark: Lark) -> list[str]:
    texts = (block.after,) if isinstance(block.after, str) else block.after
    return [lark.text(text) for text in texts if text]


def _spaced(block: BlockGrammar, lark: Lark, parts: Sequence[str]) -> str:
    return f" {_space(block, lark)} ".join(parts)


def _space(block: BlockGrammar, lark: Lark) -> str:
    return lark.terminal(f"/{block.space}/") if block.space else ""
