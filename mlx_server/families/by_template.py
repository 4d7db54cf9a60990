"""Recognises a family by parsing the calls that the chat template renders.

A template that renders calls shows the format that the model was trained on, whatever its model
type is. So a family that can't parse them is the wrong one. The model gets a family that can, or
one with a format learnt from rendered calls: samples of one call and of two show which delimiters
stand around a call's parts. It is used only if it can parse the samples.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mlx_server.errors import BadRequest
from mlx_server.events import folded
from mlx_server.families.base import ModelFamily
from mlx_server.families.markup import MarkupFamily
from mlx_server.messages import Tool
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.control_token_guard import common_length
from mlx_server.prompts.message_normalization import REASONING_KEYS, Content, TemplateCapabilities
from mlx_server.prompts.template_capabilities import (
    ANSWER,
    RESULT,
    THOUGHT,
    USER,
    TemplateMessage,
    template_capabilities,
    with_parts,
)
from mlx_server.system.sandbox.chat_template import ChatTemplate, TemplateLimitExceeded
from mlx_server.tool_parsers import json_calls
from mlx_server.tool_parsers.call_format import CallFormat, finished_calls
from mlx_server.tool_parsers.json_calls import ARGUMENTS, NAMES, JsonCallForm
from mlx_server.tool_parsers.keyed_calls import keyed_calls
from mlx_server.tool_parsers.named_calls import (
    JSON,
    PYTHON,
    CallArguments,
    NamedCallFormat,
    python_arguments,
)

KEYS = ("keyq", "lastq")
SAMPLED_TOOLS = tuple(
    Tool(
        name,
        f"{name}.",
        {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}},
    )
    for name in ("toolq", "workq")
)

Call = tuple[str, dict[str, str]]

CALLS: tuple[Call, ...] = (
    ("toolq", {"keyq": "valq1", "lastq": "valq2"}),
    ("workq", {"keyq": "valq3", "lastq": "valq4"}),
)

PLAIN_ID, NAMED_ID = "callzq00{number}", "functions.{name}:{number}"

SIDES = re.compile(r"begin|start|open|prefix|end|close|suffix|[^a-z]")
"""Matches the part in which an opening delimiter differs from its closing one."""

OPENING = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*\Z")
CLOSING = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]]+\])")


@dataclass(frozen=True)
class CallSample:
    written: str
    """The text of the turn, without what ends the turn."""
    calls: tuple[Call, ...]
    is_whole: bool = True
    """Whether `written` ends with the turn; else it ends where a result of the call begins."""


@dataclass(frozen=True)
class TemplateSamples:
    calls: tuple[CallSample, ...] = ()
    """A turn with one call, and one with two where the template renders several."""
    named: tuple[CallSample, ...] = ()
    """The same turns with ids that contain the name, as some models write nothing but the id."""
    thoughts: tuple[str, str] | None = None
    """The delimiters around a turn's reasoning."""


def template_samples(template: ChatTemplate, tokens: dict[str, str]) -> TemplateSamples:
    """Returns no samples of a template that takes too long: a request can report that better."""
    try:
        return _sampled(template, tuple(sorted(tokens.items())))
    except TemplateLimitExceeded:
        return TemplateSamples()


@lru_cache(maxsize=64)
def _sampled(template: ChatTemplate, tokens: tuple[tuple[str, str], ...]) -> TemplateSamples:
    capabilities = template_capabilities(template, dict(tokens))
    return _Sampling(template, dict(tokens), capabilities).samples()


@dataclass(frozen=True)
class _Sampling:
    template: ChatTemplate
    tokens: dict[str, str]
    capabilities: TemplateCapabilities

    def samples(self) -> TemplateSamples:
        capabilities = self.capabilities
        if capabilities.calls == "never":
            return TemplateSamples(thoughts=self._thoughts())
        shape = "text" if capabilities.arguments == "text" else "object"
        counts = (1, 2) if capabilities.calls == "many" else (1,)
        sampled = [
            [self._calls(CALLS[:n], shape, capabilities.empty_content, id) for n in counts]
            for id in (PLAIN_ID, NAMED_ID)
        ]
        plain, named = (tuple(filter(None, found)) for found in sampled)
        return TemplateSamples(plain, () if named == plain else named, self._thoughts())

    def _rendered(self, *messages: TemplateMessage) -> str:
        """Returns the prompt; empty if the template refuses the messages."""
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": {**tool.parameters, "required": list(KEYS)},
                },
            }
            for tool in SAMPLED_TOOLS
        ]
        given = with_parts(messages, self.capabilities.parts)
        variables = {**self.tokens, "messages": given, "tools": tools}
        try:
            return self.template.render({**variables, "add_generation_prompt": False})
        except TemplateLimitExceeded:
            raise
        except BadRequest:
            return ""

    def _calls(
        self, calls: Sequence[Call], shape: str, content: Content, id: str
    ) -> CallSample | None:
        user = {"role": "user", "content": USER}
        turn = {"role": "assistant", "content": content, "tool_calls": _made(calls, shape, id)}
        answered = self._rendered(user, {"role": "assistant", "content": ANSWER})
        prompt = self._rendered(user, turn)
        if not answered:
            return None
        if _shows(prompt, calls):
            return CallSample(_without_end(_turn(prompt, answered), answered), tuple(calls))
        prompt = self._rendered(user, turn, *_results(calls, id))
        if not _shows(prompt, calls):
            return None
        written = _turn(prompt, answered)
        return CallSample(written[: written.find(RESULT)], tuple(calls), is_whole=False)

    def _thoughts(self) -> tuple[str, str] | None:
        keyed = dict.fromkeys(REASONING_KEYS, THOUGHT)
        turn = {"role": "assistant", "content": ANSWER, **keyed}
        before, thought, after = self._rendered({"role": "user", "content": USER}, turn).partition(
            THOUGHT
        )
        opening, closing = OPENING.search(before), CLOSING.match(after)
        if not (thought and opening and closing):
            return None
        pair = opening[1], closing[1]
        named = {SIDES.sub("", mark.lower()) for mark in pair}
        return pair if len(named) == 1 and pair[0] != pair[1] else None


def common_beginning(one: str, other: str) -> str:
    return one[: common_length(one, other)]


def whole_delimiters(text: str) -> str:
    """Returns the text without the beginning of a delimiter at its end."""
    begun = text.rfind("<")
    return text[:begun] if begun > text.rfind(">") else text


def _made(calls: Sequence[Call], shape: str, id: str) -> list[dict[str, Any]]:
    def arguments(given: dict[str, str]) -> Any:
        return json.dumps(given) if shape == "text" else given

    return [
        {
            "id": id.format(name=name, number=number),
            "type": "function",
            "function": {"name": name, "arguments": arguments(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]


def _results(calls: Sequence[Call], id: str) -> list[TemplateMessage]:
    return [
        {
            "role": "tool",
            "content": RESULT,
            "tool_call_id": id.format(name=name, number=number),
            "name": name,
        }
        for number, (name, _) in enumerate(calls)
    ]


def _shows(prompt: str, calls: Sequence[Call]) -> bool:
    if "'arguments': " in prompt:  # the repr of a call, which no model was trained on
        return False
    return all(value in prompt for _, given in calls for value in given.values())


def _turn(prompt: str, answered: str) -> str:
    """Returns the part of the prompt from where it differs from `answered`, which has a turn of
    nothing but text instead."""
    return prompt[len(whole_delimiters(common_beginning(prompt, answered))) :]


def _without_end(written: str, answered: str) -> str:
    end = common_beginning(written[::-1], answered[::-1])[::-1]
    before = written[: len(written) - len(end)]
    if before and before[-1] not in "})]>\n`":  # this is only the end of a longer delimiter
        begins = [at for at in map(end.find, "<[\n") if at >= 0]
        end = end[min(begins) :] if begins else ""
    return written[: len(written) - len(end)] if end else written


FENCE = re.compile(r"(```\w*)\s*\Z")


def learned_formats(samples: tuple[CallSample, ...]) -> Iterator[CallFormat]:
    """Yields call formats that the samples may be written in, the likeliest first."""
    whole = [sample for sample in samples if sample.is_whole]
    if whole:
        one, several = whole[0], whole[1] if len(whole) > 1 else None
        yield from _as_objects(one)
        yield from _named_formats(several or one, _json_arguments, JSON)
        yield from _named_formats(several or one, _python_arguments, PYTHON)
        yield from _paired_format(several or one)


# Calls as JSON objects


def _as_objects(one: CallSample) -> Iterator[CallFormat]:
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


def _delimiters(sample: CallSample, spans: list[_Span]) -> _CallDelimiters:
    """Splits the text around the calls of a sample into delimiters."""
    text, first, last = sample.written, spans[0], spans[-1]
    before, after_name = text[: first.name], text[first.name_end : first.arguments]
    after = text[last.end :].lstrip()
    if len(spans) == 1:
        return _CallDelimiters("", before.strip(), after_name, after.strip(), "", "")
    between = text[first.end : spans[1].name].lstrip()
    ending = whole_delimiters(common_beginning(between, after))
    opening = _common_opening(before, between[len(ending) :])
    return _CallDelimiters(
        opens=before[: len(before) - len(opening)].strip(),
        before_name=opening,
        after_name=after_name,
        closes_call=ending.strip(),
        between=between[len(ending) : len(between) - len(opening)],
        closes=after[len(ending) :].strip(),
    )


def _common_opening(one: str, other: str) -> str:
    """Returns the delimiters with which both texts end."""
    opening = common_beginning(one[::-1], other[::-1])[::-1]
    if ">" in opening and opening.find(">") < opening.find("<"):  # it begins within a delimiter
        opening = opening[opening.find(">") + 1 :]
    return opening.lstrip()


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
        arguments = python_arguments(delimiters.closes_call, delimiters.closes)
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


def _paired_format(sample: CallSample) -> Iterator[CallFormat]:
    """Yields the format if each argument is a key and a value between delimiters of their own."""
    spans = _spans(sample, _pairs)
    if not spans or not (delimiters := _delimiters(sample, spans)).before_name:
        return
    opens, inner, closes = _around_pairs(sample.written[spans[0].name_end :], sample.calls[0][1])
    key_closes, border, value_opens = inner.partition("><")
    yield keyed_calls(
        opens=delimiters.opens,
        before_name=delimiters.before_name,
        after_name=delimiters.after_name.strip(),
        closes_call=delimiters.closes_call,
        closes=delimiters.closes if delimiters.opens else "",
        key_opens=opens,
        key_closes=key_closes + border[:1],
        value_opens=border[1:] + value_opens,
        value_closes=closes,
    ).call_format()


def _pairs(text: str, name_end: int, arguments: dict[str, str]) -> tuple[int, int] | None:
    opens, _, closes = _around_pairs(text[name_end:], arguments)
    if not (opens.startswith("<") and closes.strip()):
        return None
    end = text.find(closes, text.find([*arguments.values()][-1], name_end))
    return (text.find(opens, name_end), end + len(closes)) if end >= 0 else None


def _around_pairs(text: str, arguments: dict[str, str]) -> tuple[str, str, str]:
    """Returns the delimiters before a key, between key and value, and after the value; empty ones
    if the text does not begin with the arguments as pairs."""
    (key, value), (other, last) = arguments.items()
    before, _, rest = text.partition(key)
    inner, _, rest = rest.partition(value)
    between, found, rest = rest.partition(other)
    opens = _common_opening(before, between)
    is_paired = found and rest.startswith(inner + last)
    return (opens, inner, between[: len(between) - len(opens)].rstrip()) if is_paired else ("",) * 3


log = logging.getLogger("mlx_server.families")

LEARNED = "from_template"
"""The name of families that are made from a template."""


@dataclass(frozen=True)
class ReadBack:
    """The result of parsing a sample with a family's parser."""

    is_right: bool
    """Whether the calls are those of the sample."""
    text: str
    """The text that is left next to the calls."""
    repairs: frozenset[str]
    """The kinds of repairs that the parser made."""


def read_back(family: ModelFamily, sample: CallSample) -> ReadBack:
    parser = family.make_parser(ParseContext(tools=SAMPLED_TOOLS))
    events = [*parser.feed(-1, sample.written), *parser.finish(cut=False)]
    answer = folded(events)
    calls = tuple((call["name"], call["arguments"]) for call in finished_calls(events))
    return ReadBack(
        is_right=calls == sample.calls,
        text=answer.text.strip(),
        repairs=frozenset(repair.what for repair in answer.repairs),
    )


def samples_of(checkpoint: Checkpoint) -> TemplateSamples:
    template = checkpoint.tool_template or checkpoint.template
    return template_samples(template, checkpoint.tokens) if template else TemplateSamples()


def confirmed(
    found: ModelFamily, plain: MarkupFamily, families: Iterable[ModelFamily], checkpoint: Checkpoint
) -> ModelFamily:
    """The family `found` if it parses the calls of the checkpoint's template; else another family
    that does, or one made from the template. If there is none, it is `found`."""
    samples = samples_of(checkpoint)
    if not isinstance(found, MarkupFamily) or not samples.calls:
        return found
    if reads(found, samples.calls) or reads(found, samples.named or samples.calls):
        return found
    others = [f for f in families if isinstance(f, MarkupFamily) and f is not found]
    source = checkpoint.template_source
    is_readable = found is not plain and reads_all(found, samples.calls, repaired=True)
    if is_readable and _describes_calls(found, samples, source):
        return found
    # of equal formats the most general: Hermes', then one that no marker ties to other templates
    others.sort(key=lambda family: (family.name != "hermes", not family.is_marked(source)))
    chosen = next(_readers(others, samples), None)
    if chosen is None and is_readable:
        return found  # a template's slips in its own format make no other format
    chosen = chosen or learned(plain, samples)
    chosen = chosen or next((other for other in others if reads(other, samples.calls[:1])), None)
    if chosen is None or reads(found, samples.calls[:1]):
        return found
    log.info(
        "the chat template writes calls in the format of the family %s, not of %s: it is read",
        *(chosen.name, found.name),
    )
    return chosen if chosen.name == LEARNED else _with_thoughts(chosen, samples)


def _readers(families: Sequence[MarkupFamily], samples: TemplateSamples) -> Iterator[MarkupFamily]:
    for calls in filter(None, (samples.calls, samples.named)):
        yield from (family for family in families if reads_all(family, calls))


def reads(family: ModelFamily, samples: Sequence[CallSample], *, repaired: bool = False) -> bool:
    """Whether the family parses the samples. repaired: it may do so with any repair."""
    allowed = {"unmarked"} if family.name == "plain" else set[str]()
    readings = (read_back(family, sample) for sample in samples)
    return all(
        reading.is_right and (repaired or reading.repairs <= allowed) for reading in readings
    )


def _describes_calls(family: ModelFamily, samples: TemplateSamples, template: str) -> bool:
    """Whether the template asks for the family's calls in words, and renders earlier ones as bare
    JSON, as vLLM's template for Phi-4-mini does."""
    is_bare = all(sample.written.lstrip().startswith(("{", "[")) for sample in samples.calls)
    delimiters = family.call_delimiters(SAMPLED_TOOLS)
    return is_bare and any(len(each) > 1 and each in template for each in delimiters)


def reads_all(
    family: ModelFamily, samples: Sequence[CallSample], *, repaired: bool = False
) -> bool:
    """Whether the family parses the samples and leaves no text of them."""
    return reads(family, samples, repaired=repaired) and not any(
        sample.is_whole and read_back(family, sample).text for sample in samples
    )


def learned(plain: MarkupFamily, samples: TemplateSamples) -> MarkupFamily | None:
    """A family with a call format made from the template's samples; None if none can be made."""
    for call_format in learned_formats(samples.calls):
        layout = MarkupLayout(call_formats=(call_format,))
        family = _with_thoughts(replace(plain, name=LEARNED, layout=layout), samples)
        # checked with other ids too, since an id may have been taken for part of a delimiter
        if all(reads_all(family, calls) for calls in (samples.calls, samples.named)):
            return family
    return None


def _with_thoughts(family: MarkupFamily, samples: TemplateSamples) -> MarkupFamily:
    """The family, with the reasoning delimiters that the template writes if it lacks them."""
    pair, layout = samples.thoughts, family.layout
    if pair is None or not isinstance(layout, MarkupLayout):
        return family
    if any(pair[0] in opening for opening in layout.opens_reasoning):
        return family
    reasoning = (pair, *layout.reasoning)
    return replace(family, layout=replace(layout, reasoning=reasoning), answer_prefix=pair[1])
