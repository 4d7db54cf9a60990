"""Makes a call format from the calls that a chat template renders, for models of no known family.

Samples of one call and of two show which delimiters stand around a call's parts. A format is used
only if it can parse the samples (see by_template.py).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from mlx_server.prompts.template_samples import CallSample, common_beginning, whole_delimiters
from mlx_server.tool_parsers import json_calls
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.json_calls import ARGUMENTS, NAMES, JsonCallForm
from mlx_server.tool_parsers.keyed_calls import keyed_calls
from mlx_server.tool_parsers.named_calls import (
    JSON,
    PYTHON,
    CallArguments,
    NamedCallFormat,
    python_arguments,
)
from mlx_server.tool_parsers.tags import TagSyntax, tagged, without_block

FENCE = re.compile(r"(```\w*)\s*\Z")


def learned_formats(samples: tuple[CallSample, ...]) -> Iterator[CallFormat]:
    """Yields call formats that the samples may be written in, the likeliest first."""
    whole = [sample for sample in samples if sample.is_whole]
    if whole:
        one, several = whole[0], whole[1] if len(whole) > 1 else None
        makers = (_as_objects, _as_names_and_json, _as_python, _as_pairs)
        yield from chain.from_iterable(maker(one, several) for maker in makers)


# Calls as JSON objects


def _as_objects(one: CallSample, several: CallSample | None) -> Iterator[CallFormat]:
    name, arguments = one.calls[0]
    for at, found, end in _objects(one.written):
        names = [key for key in NAMES if found.get(key) == name]
        given = [key for key in ARGUMENTS if found.get(key) in (arguments, json.dumps(arguments))]
        if names and given:
            form = JsonCallForm(names[0], (given[0],))
            before, after = one.written[:at].rstrip(), one.written[end:].lstrip()
            if before.endswith("[") and after.startswith("]"):
                before, after = before[:-1].rstrip(), after[1:].lstrip()
            fenced = FENCE.search(before)
            opens, fence = (before[: fenced.start()], fenced[1]) if fenced else (before, "")
            if not (opens := opens.strip()):
                return
            if after.strip():
                yield json_calls.marked_json(opens, after.strip(), form, fence)
            else:
                yield json_calls.marked_object(opens, form=form)
            return


def _objects(text: str) -> Iterator[tuple[int, dict[str, object], int]]:
    """Yields the start, the value and the end of each JSON object in a text, outer ones first."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            found, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        yield match.start(), found, end


# Calls by name


@dataclass(frozen=True)
class _Span:
    """The positions of a call's name and its arguments in a text."""

    name: int
    name_end: int
    arguments: int
    end: int
    """The end of the arguments."""


FindArguments = Callable[[str, int, dict[str, str]], tuple[int, int] | None]
"""Finds the begin and end of the given arguments in a text, after the end of the name."""


@dataclass(frozen=True)
class _CallDelimiters:
    """The delimiters around calls and their names."""

    opens: str
    before_name: str
    after_name: str
    closes_call: str
    between: str
    closes: str


def _spans(sample: CallSample, find: FindArguments) -> list[_Span]:
    """The positions of each call; empty if one of them is not found."""
    found: list[_Span] = []
    end = 0
    for name, arguments in sample.calls:
        at = sample.written.find(name, end)
        place = find(sample.written, at + len(name), arguments) if at >= 0 else None
        if place is None:
            return []
        end = place[1]
        found.append(_Span(at, at + len(name), *place))
    return found


def _delimiters(sample: CallSample, spans: list[_Span], closing: str = "") -> _CallDelimiters:
    """Splits the text around the calls of a sample into delimiters.

    closing: a delimiter after the arguments that belongs to them, for example that of a value.
    """
    text, first, last = sample.written, spans[0], spans[-1]
    before, after_name = text[: first.name], text[first.name_end : first.arguments]
    after = text[last.end :].lstrip().removeprefix(closing)
    if len(spans) == 1:
        return _CallDelimiters("", before.strip(), after_name, after.strip(), "", "")
    between = text[first.end : spans[1].name].lstrip().removeprefix(closing)
    ending = whole_delimiters(common_beginning(between, after))
    opening = common_beginning(before[::-1], between[len(ending) :][::-1])[::-1]
    if ">" in opening and opening.find(">") < opening.find("<"):  # it begins within a delimiter
        opening = opening[opening.find(">") + 1 :]
    opening = opening.lstrip()
    return _CallDelimiters(
        opens=before[: len(before) - len(opening)].strip(),
        before_name=opening,
        after_name=after_name,
        closes_call=ending.strip(),
        between=between[len(ending) : len(between) - len(opening)],
        closes=after[len(ending) :].strip(),
    )


def _as_names_and_json(one: CallSample, several: CallSample | None) -> Iterator[CallFormat]:
    yield from _named_formats(several or one, _json_arguments, JSON)


def _as_python(one: CallSample, several: CallSample | None) -> Iterator[CallFormat]:
    yield from _named_formats(several or one, _python_arguments, PYTHON)


def _named_formats(
    sample: CallSample, find: FindArguments, arguments: CallArguments
) -> Iterator[CallFormat]:
    if not (spans := _spans(sample, find)):
        return
    delimiters = _delimiters(sample, spans)
    opens, before_name = delimiters.opens, delimiters.before_name
    if not (opens or before_name):
        return
    after_name = delimiters.after_name.strip()
    if arguments is PYTHON:
        arguments = python_arguments(*filter(None, (delimiters.closes_call, delimiters.closes)))
    passed = tuple(filter(None, (delimiters.between.strip(),)))
    yield NamedCallFormat(
        opens=opens or before_name,
        before_name=before_name,
        after_name=after_name,
        before_arguments=delimiters.after_name[len(delimiters.after_name.rstrip()) :],
        arguments=arguments,
        closes_call=delimiters.closes_call,
        between=delimiters.between if opens else None,
        closes=delimiters.closes,
        passed=passed,
    ).call_format()


def _json_arguments(text: str, name_end: int, arguments: dict[str, str]) -> tuple[int, int] | None:
    at = text.find("{", name_end)
    for start, found, end in _objects(text[at:]) if at >= 0 else ():
        return (at, at + end) if not start and found == arguments else None
    return None


def _python_arguments(
    text: str, name_end: int, arguments: dict[str, str]
) -> tuple[int, int] | None:
    quoted = (rf"{key}\s*=\s*['\"]{value}['\"]" for key, value in arguments.items())
    found = re.compile(r"\(\s*" + r",\s*".join(quoted) + r"\s*\)").match(text, name_end)
    return (name_end + 1, found.end()) if found else None


# Calls of keys and values


def _pairs(text: str, name_end: int, arguments: dict[str, str]) -> tuple[list[int], list[int]]:
    begins, ends, at = list[int](), list[int](), name_end
    for word in chain.from_iterable(arguments.items()):
        at = text.find(word, at)
        if at < 0:
            return [], []
        begins.append(at)
        at += len(word)
        ends.append(at)
    return begins, ends


def _pair_arguments(text: str, name_end: int, arguments: dict[str, str]) -> tuple[int, int] | None:
    begins, ends = _pairs(text, name_end, arguments)
    return (begins[0], ends[-1]) if begins else None


def _as_pairs(one: CallSample, several: CallSample | None) -> Iterator[CallFormat]:
    sample = several or one
    if not (spans := _spans(sample, _pair_arguments)):
        return
    text, first = sample.written, spans[0]
    begins, ends = _pairs(text, first.name_end, sample.calls[0][1])
    inside, between = text[ends[0] : begins[1]], text[ends[1] : begins[2]]
    if text[ends[2] : begins[3]] != inside:
        return
    following = text[first.end : spans[1].name] if len(spans) > 1 else text[first.end :]
    value_closes = whole_delimiters(common_beginning(between, following)).strip()
    key_opens = between.strip().removeprefix(value_closes).strip()
    delimiters = _delimiters(sample, spans, value_closes)
    head = delimiters.after_name.rstrip()
    if not (value_closes and key_opens and head.endswith(key_opens)):
        return
    delimiters = replace(delimiters, after_name=head.removesuffix(key_opens).strip())
    if key_opens.rstrip('"').endswith("="):
        yield from _tagged_formats(delimiters, key_opens, inside, value_closes)
    else:
        yield from _keyed_formats(delimiters, key_opens, inside.strip(), value_closes)


def _tagged_formats(
    delimiters: _CallDelimiters, key_opens: str, inside: str, value_closes: str
) -> Iterator[CallFormat]:
    quote = '"' if key_opens.endswith('"') else ""
    opens, function = delimiters.opens, delimiters.before_name
    function_end, block_end = delimiters.closes_call, delimiters.closes
    if not opens:  # each call has a block of its own, or there is none
        at, end = function.rfind("<"), function_end.find(">") + 1
        opens, function = function[:at].strip(), function[at:]
        function_end, block_end = function_end[:end], function_end[end:].strip()
    if inside.strip() != f"{quote}>" or delimiters.after_name != f"{quote}>" or not function_end:
        return
    tags = TagSyntax(
        function=function.removesuffix(quote),
        function_end=function_end,
        parameter=key_opens.removesuffix(quote),
        parameter_end=value_closes,
        block_end=block_end,
        margin="\n" if inside.endswith("\n") else "",
        quote=quote,
    )
    if opens and block_end:
        yield tagged(opens, tags)
    elif not (opens or block_end):
        yield without_block(tags, taught=True)


def _keyed_formats(
    delimiters: _CallDelimiters, key_opens: str, inside: str, value_closes: str
) -> Iterator[CallFormat]:
    key_closes = inside[: inside.find(">") + 1] or inside
    before = delimiters.before_name or delimiters.opens
    if key_closes and before and delimiters.closes_call:
        yield keyed_calls(
            opens=delimiters.opens if delimiters.before_name else "",
            before_name=before,
            after_name=delimiters.after_name,
            key_opens=key_opens,
            key_closes=key_closes,
            value_opens=inside.removeprefix(key_closes).strip(),
            value_closes=value_closes,
            closes_call=delimiters.closes_call,
            closes=delimiters.closes,
        ).call_format()
