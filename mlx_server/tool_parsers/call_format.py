"""The format of a call: its delimiters, the reader of what stands between them, and its grammar."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeVar

from mlx_server.errors import BadRequest
from mlx_server.events import Event, RepairKind, ToolCallFinished, folded
from mlx_server.grammars.arguments import MemberSchema, object_of
from mlx_server.grammars.formats import schema_unenforced
from mlx_server.grammars.grammar import SPACE, UnsupportedKeyword
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.requests import ALL_REPAIRS, RepairPolicy
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed, UnknownTool
from mlx_server.tool_parsers.source import Source, Steps, complete_source


class UncallableTool(BadRequest):
    """A tool that can't be called in a call format."""

    def __init__(self, what: str) -> None:
        super().__init__(f"This model has no way to write {what}.", param="tools")


ParameterWriter = Callable[[MemberSchema], str | None]
"""Returns a parameter as symbols of a rule; None if the format can't express its key."""

ParameterRules = tuple[str, bool]
"""The rule of a parameter, and whether it is required."""


ParameterVariants = Sequence[Sequence[MemberSchema]]
"""Alternative lists of members; the arguments have those of one list."""


def one_by_one_rule(variants: ParameterVariants, write: ParameterWriter, lark: Lark) -> str:
    def in_turn(members: Sequence[MemberSchema]) -> str:
        texts = (text if required else f"({text})?" for text, required in _all(members, write))
        return " ".join(texts) or '""'

    return _any([in_turn(members) for members in variants], lark)


def comma_separated_rule(
    variants: ParameterVariants, write: ParameterWriter, lark: Lark, comma: str
) -> str:
    """comma: what separates two parameters, as symbols of a rule."""
    return _any([_parted(members, write, lark, comma) for members in variants], lark)


def _parted(members: Sequence[MemberSchema], write: ParameterWriter, lark: Lark, comma: str) -> str:
    written = _all(members, write)
    rest, options = "", []
    for text, required in reversed(written):
        options.append(f"{text} {rest}")
        if required:
            options = options[-1:]
        more = f"{comma} {text}" if required else f"({comma} {text})?"
        rest = lark.rule(f"{more} {rest}")
    options = options[::-1]
    if not any(required for _, required in written):
        return lark.rule(" | ".join([*options, '""']))
    return lark.rule(" | ".join(options))


def _any(written: Sequence[str], lark: Lark) -> str:
    if not written:
        raise UncallableTool("arguments that the tool's schema allows")
    return lark.rule(" | ".join(written))


def _all(members: Sequence[MemberSchema], write: ParameterWriter) -> list[ParameterRules]:
    written: list[ParameterRules] = []
    for member in members:
        text = write(member)
        if text is not None:
            written.append((text, member.required))
        elif member.required:
            raise UncallableTool(f"a parameter called {member.key!r}")
    return written


BlockReader = Callable[[Source, ToolCallEmitter], Steps[None]]
"""Reads what follows the opening delimiter, the closing one included; raises Malformed."""

BlockRepair = Callable[[str], Sequence[tuple[str, dict[str, Any]]]]
"""Finds the names and arguments in broken text from between the delimiters; raises Malformed."""


@dataclass(frozen=True)
class BlockGrammar:
    """The grammar of the text after the opening delimiter: `before`, then calls with `between` in
    the middle, then `after`. Texts are as the model writes them, delimiters included."""

    call: Callable[[Lark, Tool], str]
    """Returns one call of this tool, with the arguments that its schema allows, as symbols of a
    rule."""
    before: str = ""
    between: str | None = None
    """The text between two calls; None: a block has one call."""
    after: str | tuple[str, ...] = ""
    """The texts that may follow the last call, mostly the closing delimiter."""
    unsupported: Callable[[Tool], Sequence[UnsupportedKeyword]] = lambda _: ()
    """Returns the keywords of a tool's schema that are not enforced in its calls, besides those
    that are not enforced in JSON either."""
    may_be_empty: bool = False
    """Whether models write a block without a call, when they decide to call nothing."""
    read_on: str = ""
    """A regular expression of what must not follow a block without a closing delimiter, because
    `read` would take it for a part of the block."""
    space: str = rf"({SPACE})?"
    """A regular expression of the white space next to these texts and calls, "" for none. It allows
    less than `read` skips: a small model would write white space for ever."""

    def first(self, lark: Lark, tool: Tool, space: str = "") -> str:
        """Returns the first call of a block. space: what may be before the call of a block without
        delimiters, as a regular expression."""
        return self.call(lark, tool)


@dataclass(frozen=True, kw_only=True)
class UnmarkedBlockGrammar(BlockGrammar):
    """A block of a call format without delimiters (see `CallFormat.begins`).

    A text must not begin like a call, so `head` is the beginning that makes a call certain.
    """

    head: Callable[[Tool], str]
    """Returns a regular expression of the beginning of a block whose first call is of this tool. It
    includes `begins`, and ends where the block can't be text any more."""
    rest: Callable[[Lark, Tool], str]
    """Returns the rest of that call."""
    begins_with_name: bool = False
    """Whether it begins with a tool's name, as no JSON does."""
    as_json: Callable[[Lark, Tool], str] | None = None
    """Returns the rule of a call that may stand beside formatted JSON, if one can."""

    def first(self, lark: Lark, tool: Tool, space: str = "") -> str:
        return f"{lark.terminal(f'/{space}{self.head(tool)}/')} {self.rest(lark, tool)}"


@dataclass(frozen=True)
class CallFormat:
    read: BlockReader
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    may_close: tuple[str, ...] = ()
    """Closing delimiters that models write after a block although no template has them."""
    inner: tuple[str, ...] = ()
    """Further delimiters, which stand within a block."""
    begins: tuple[str, ...] = ()
    """The beginnings of an answer that are a block, in a format without an opening delimiter; they
    are read with it."""
    repair: BlockRepair | None = None
    """Repairs a block that was closed and could not be read."""
    repairs: tuple[RepairKind, ...] = ()
    """Repairs that are reported for such calls: the model was trained on another format."""
    ends_answer: bool = False
    """Whether a grammar allows nothing but calls after a block: models that write on there make up
    the result."""
    blocks: tuple[BlockGrammar, ...] = ()
    """The grammars of the layouts that models were trained on; empty if none can be expressed."""


def read_block(
    call_format: CallFormat,
    source: Source,
    tools: Sequence[Tool],
    events: list[Event],
    allowed: RepairPolicy = ALL_REPAIRS,
) -> None:
    """Reads a block from after its opening delimiter, from a complete source. Raises Malformed if
    it is no block; `events` then has those that precede the error."""

    def emit(event: Event) -> None:
        if isinstance(event, ToolCallFinished):
            source.keep()
        events.append(event)

    source.keep()
    _read_calls(call_format, source, ToolCallEmitter(0, tools, emit, allowed=allowed))


def _read_calls(call_format: CallFormat, source: Source, calls: ToolCallEmitter) -> None:
    try:
        _exhaust(call_format.read(source, calls))
    except Malformed as first:
        if not call_format.repair or isinstance(first, UnknownTool):
            raise
        broken = [source.kept()]
        _exhaust(source.up_to(*call_format.closes, into=broken.append))
        try:
            calls.add_repaired(call_format.repair("".join(broken)))
        except Malformed:
            raise first from None


def _exhaust(steps: Steps[Any]) -> None:
    for _ in steps:
        raise AssertionError("a closed source has nothing to wait for")


def finished_calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns the finished calls, as mlx-lm's parsers give them, and with their ids."""
    return [
        {"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)}
        for call in folded(events).calls
    ]


T = TypeVar("T")

BAR, JOINT = "｜", "▁"
BARS, JOINTS = (BAR, "|"), (JOINT, "_", " ", r"\_")


@lru_cache
def respelled_delimiter(delimiter: str) -> tuple[str, ...]:
    """Returns the delimiter in each other spelling; nothing for one of ordinary characters."""
    spellings = (delimiter.replace(BAR, b).replace(JOINT, j) for b, j in product(BARS, JOINTS))
    return tuple(dict.fromkeys(each for each in spellings if each != delimiter))


def respelled(record: T) -> Iterator[T]:
    """Yields the dataclass with all of its texts in each other spelling."""
    make, records = type(record), [record]
    for bar, joint in product(BARS, JOINTS):
        texts = {name: _spelled(value, bar, joint) for name, value in vars(record).items()}
        if (other := make(**texts)) not in records:
            records.append(other)
            yield other


def _spelled(value: Any, bar: str, joint: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_spelled(each, bar, joint) for each in value)
    return value.replace(BAR, bar).replace(JOINT, joint) if isinstance(value, str) else value


def block_rule(
    block: BlockGrammar, lark: Lark, tools: Sequence[Tool], *, several: bool, space: str = ""
) -> str:
    """Returns the rule of a block after its opening delimiter, or of a whole one without. several:
    whether it may have more than one call, if its format allows that. space: see `first`."""
    refuse_unsupported(block, tools)
    call = one_of(writable(lambda tool: block.call(lark, tool), tools))
    first = call  # made once: schemas are long
    if isinstance(block, UnmarkedBlockGrammar):
        first = one_of(writable(lambda tool: block.first(lark, tool, space), tools))
    calls = f"({first}) {_more(block, lark, call) if several else ''}"
    return lark.rule(_spaced(block, lark, [*_before(block, lark), calls, *_after(block, lark)]))


def empty_block(block: BlockGrammar, lark: Lark) -> str:
    return lark.rule(_spaced(block, lark, [*_before(block, lark), *_after(block, lark)]))


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
    return tuple(dict.fromkeys([*schema_unenforced(object_of(tool.parameters)), *unsupported]))


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


def _before(block: BlockGrammar, lark: Lark) -> list[str]:
    if isinstance(block, UnmarkedBlockGrammar):
        return []
    return ["", lark.text(block.before)] if block.before else [""]


def _after(block: BlockGrammar, lark: Lark) -> list[str]:
    texts = (block.after,) if isinstance(block.after, str) else block.after
    return [lark.text(text) for text in texts if text]


def _spaced(block: BlockGrammar, lark: Lark, parts: Sequence[str]) -> str:
    space = lark.terminal(f"/{block.space}/") if block.space else ""
    return f" {space} ".join(parts)


MOST_UNKNOWN = 16
"""The most names of unknown tools in one block; for each of them the block is read once more."""

SEPARATORS = " \t\r\n,;"


def mixed_block(
    call_format: CallFormat, text: str, tools: Sequence[Tool], allowed: RepairPolicy
) -> tuple[list[Event], int]:
    """Returns the events of the calls that a text begins with, after a block's opening delimiter or
    another call, and the number of their characters. Tools of any name are called.

    Malformed if it begins with anything else, or if none of the calls is of a known tool.
    """
    unknown: dict[str, Tool] = {}
    while len(unknown) <= MOST_UNKNOWN:
        source, events = complete_source(text), list[Event]()
        source.take(len(text) - len(text.lstrip(SEPARATORS)))
        try:
            read_block(call_format, source, (*tools, *unknown.values()), events, allowed)
        except UnknownTool as error:
            unknown[error.name] = Tool(error.name)
            continue
        if any(call["name"] not in unknown for call in finished_calls(events)):
            return events, source.position
        break
    raise Malformed("no call of a known tool")
