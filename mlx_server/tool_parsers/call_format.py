"""The format of a call: its delimiters, and the reader of what stands between them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.events import Event, RepairKind, ToolCallFinished, folded
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.repair.allowed import ALL_REPAIRS, RepairPolicy
from mlx_server.repair.model_json import Malformed, UnknownTool
from mlx_server.schemas.grammar import SPACE
from mlx_server.schemas.report import UnsupportedKeyword
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.source import Source, Steps, complete_source

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


def parse_calls(call_format: CallFormat, text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the calls in a text from after the opening delimiter; ValueError if it holds none."""
    events: list[Event] = []
    try:
        read_block(call_format, complete_source(text), tools, events)
    except Malformed as error:
        if not any(isinstance(event, ToolCallFinished) for event in events):
            raise ValueError(str(error)) from None
    return finished_calls(events)


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
