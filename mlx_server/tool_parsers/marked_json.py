"""JSON calls between delimiters: an object, several, or an array of them, perhaps in a fence."""

from functools import partial

from mlx_server.repair.model_json import Malformed
from mlx_server.tool_parsers.call_format import BlockGrammar, CallFormat, UnmarkedBlockGrammar
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.json_calls import GAP, JsonCallForm, call_object, repaired
from mlx_server.tool_parsers.source import Source, Steps

FORM = JsonCallForm()

READ_ON = r"\s*[,;{]"
"""Matches the beginning of a further object, which would be read as a call."""


def marked_json(
    opens: str, closes: str = "", form: JsonCallForm = FORM, fence: str = ""
) -> CallFormat:
    """closes: empty if the end of the JSON is the end of the block. fence: the opening of the block
    of code that models write around all of the JSON."""
    delimiters = (closes,) if closes else ()
    before = "" if opens.endswith("[") else f"{fence}\n[" if fence else "["
    blocks = [array_block(form, closes, before)]
    if closes and not fence:
        blocks.insert(0, BlockGrammar(form.call, between="", after=closes))
    read = partial(_read_block, delimiters)
    return CallFormat(
        read, (opens,), delimiters, repair=repaired, ends_answer=True, blocks=tuple(blocks)
    )


def marked_object(
    *opens: str, form: JsonCallForm = FORM, follows: tuple[str, ...] = ()
) -> CallFormat:
    """Returns a format with one call after each delimiter, which ends with its JSON. follows:
    delimiters of other parts of an answer, which may come right after it."""
    block = BlockGrammar(form.call, read_on=READ_ON)
    read = partial(_read_object, (*opens, *follows))
    return CallFormat(read, opens, repair=repaired, ends_answer=True, blocks=(block,))


def _read_object(follows: tuple[str, ...], source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    yield from source.expect("{")
    yield from call_object(source, calls, follows)


def array_block(form: JsonCallForm, closes: str = "", before: str = "[") -> BlockGrammar:
    return BlockGrammar(form.call, before, between=",", after=("]", closes), may_be_empty=True)


def bare_block(form: JsonCallForm) -> UnmarkedBlockGrammar:
    """Returns a block of one or more objects without delimiters."""
    return UnmarkedBlockGrammar(
        call=form.call, between=";", read_on=READ_ON, head=form.head, rest=form.rest
    )


def bare_array(form: JsonCallForm) -> UnmarkedBlockGrammar:
    return UnmarkedBlockGrammar(
        call=form.call,
        between=",",
        after="]",
        head=lambda tool: rf"\[{GAP}{form.head(tool)}",
        rest=form.rest,
    )


def _read_block(closes: tuple[str, ...], source: Source, calls: ToolCallEmitter) -> Steps[None]:
    yield from source.space()
    yield from source.fence()
    yield from source.space()
    if (yield from source.expect("{", "[")) == "{":
        yield from objects(source, calls, closes)
    else:
        yield from array(source, calls, closes)


def array(source: Source, calls: ToolCallEmitter, closes: tuple[str, ...] = ()) -> Steps[None]:
    """Reads an array after its bracket."""
    yield from source.space()
    if (yield from source.accept("]")):  # the model has decided to call nothing
        yield from source.space()
        yield from source.accept(*closes)
        return
    yield from source.expect("{")
    yield from objects(source, calls, closes)


def objects(source: Source, calls: ToolCallEmitter, closes: tuple[str, ...] = ()) -> Steps[None]:
    """Reads, after the first brace, a call and those that follow, up to the closing delimiter."""
    yield from call_object(source, calls, closes)
    while True:
        yield from source.space()
        found = yield from source.accept("{", ",", ";", "]", "```", *closes)
        if found == "{":
            yield from call_object(source, calls, closes)
        elif found in closes or (found == "]" and not closes):
            return
        elif not found:
            # complete calls count, but what follows them in the block is not part of them
            if (yield from source.peek()):
                raise Malformed("more than calls between the delimiters")
            return
