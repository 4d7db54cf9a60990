"""Whatever a model writes: no parser raises, loses text or slows down, however it was cut."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_server.events import Event
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers.source import Source
from tests.contract.pairs import FAMILIES as FIRST_OF_KINDS
from tests.families.goldens import NO_TOKEN, Reads, Unit, folded, goldens_of, shown, tools

pytestmark = pytest.mark.slow

# gpt-oss is read by token ids alone: what is text to the others means nothing to its parser
NAMES = [family.name for family in FAMILIES if family.name != "gpt_oss"]

FRAGMENTS = (
    *(tool.name for tool in tools()),
    *("fly", "functions.", "functions.get_time:0", "call:", "city", "Paris", "a", "7", "-0.5e1"),
    *("true", "null", "None", "NaN", "1e999", "\\", "\\u", "\\ud800", "\\u00e9", '"', "'", "`"),
    *("{", "}", "[", "]", "(", ")", ":", ",", ", ", "=", ">", "<", "</", "/", "\n", " ", "🗼", "é"),
    *('{"name": "', '", "arguments": {', '{"a": 1, "b": 2}', '"city": "', "}}", '"type": "'),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>", "```json"),
    *("[get_time()", "get_weather(city='", "<parameter=city>", "</parameter>", "<arg_key>"),
)


@dataclass(frozen=True)
class Written:
    """What a model wrote, piece by piece, and after which prompt."""

    family: ModelFamily
    pieces: tuple[Unit, ...]
    prompt_end: str
    cut: bool

    def read(self, units: Sequence[Unit]) -> list[Event]:
        control = dict(enumerate(self.family.special_tokens))
        reading = ParseContext(tools=tools(), ends_with=self.prompt_end, control=control)
        parser = self.family.make_parser(reading)
        events = [event for token, text in units for event in parser.feed(token, text)]
        return events + parser.finish(cut=self.cut)

    def as_cut(self, size: int) -> list[Unit]:
        """With the text between control tokens in tokens of this size."""
        units: list[Unit] = []
        for token, text in self.runs():
            starts = range(0, len(text), size)
            units += (
                [(token, "")] if token >= 0 else [(token, text[at : at + size]) for at in starts]
            )
        return units

    def runs(self) -> list[Unit]:
        runs: list[Unit] = []
        for token, text in self.pieces:
            if token == NO_TOKEN and runs and runs[-1][0] == NO_TOKEN:
                text = runs.pop()[1] + text
            runs.append((token, text))
        return runs


@st.composite
def written(draw: st.DrawFn, name: str) -> Written:
    family = family_named(name)
    token = st.integers(0, len(family.special_tokens) - 1).map(lambda id: (id, ""))
    texts = st.sampled_from(FRAGMENTS) | st.text(max_size=8)
    pieces = [texts.map(lambda text: (NO_TOKEN, text))]
    pieces += [token, token] if family.special_tokens else []
    pieces += [st.sampled_from(cases).flatmap(_slices)] if (cases := _outputs(name)) else []
    ends = st.sampled_from(["", "", "<think>\n", *family.special_tokens])
    some = st.lists(st.one_of(pieces), max_size=8)
    begun = [(NO_TOKEN, text) for text in draw(st.sampled_from([[], *([o] for o in cases)]))]
    return Written(family, (*begun, *draw(some)), draw(ends), draw(st.booleans()))


def _outputs(name: str) -> list[str]:
    return [case.output for case in goldens_of(family_named(name)) if case.output]


def _slices(output: str) -> st.SearchStrategy[Unit]:
    """A golden output, or a part of one, with its control tokens spelled as text."""
    place = st.integers(0, len(output))
    ends = st.just((0, len(output))) | st.tuples(place, place)
    return ends.map(lambda pair: (NO_TOKEN, output[min(pair) : max(pair)]))


def _tokenized(wrote: Written) -> Written:
    """The same, with each control token that the text spells written as that token."""
    tokens = sorted(wrote.family.special_tokens, key=len, reverse=True)
    ids = {token: id for id, token in enumerate(wrote.family.special_tokens)}
    spelled = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
    pieces: list[Unit] = []
    for unit in wrote.runs():
        at, text = 0, unit[1]
        for found in spelled.finditer(text):
            pieces += [(NO_TOKEN, text[at : found.start()]), (ids[found[0]], "")]
            at = found.end()
        pieces.append((NO_TOKEN, text[at:]))
        pieces += [unit] if unit[0] >= 0 else []
    filled = tuple(piece for piece in pieces if piece != (NO_TOKEN, ""))
    return Written(wrote.family, filled, wrote.prompt_end, wrote.cut)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), size=st.integers(2, 9))
def test_nothing_raises_and_no_cut_changes_what_is_read(
    name: str, data: st.DataObject, size: int
) -> None:
    for wrote in (first := data.draw(written(name)), _tokenized(first)):
        at_once = folded(wrote.read(wrote.runs()))
        for cut in (1, size):
            found = folded(wrote.read(wrote.as_cut(cut)))
            assert shown(found, Reads()) == shown(at_once, Reads())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(text=st.text(st.characters(exclude_characters="<>[](){}`|｜\"'")), size=st.integers(1, 9))
def test_text_without_delimiters_stays_as_it_is(name: str, text: str, size: int) -> None:
    wrote = Written(family_named(name), ((NO_TOKEN, text),), "", cut=False)
    assert shown(folded(wrote.read(wrote.as_cut(size))), Reads()) == shown(
        Reads(text=text), Reads()
    )


SHORT, LONG = 2 << 10, 16 << 10
STOP = "<|stop|>"


REPEATED = ("<", "{", "[", " ", "<think>")
REPEATED_IN_CALLS = ("{", "[", '"', "\\", "</", "\n")


@pytest.mark.parametrize("name", [name for name in NAMES if name in FIRST_OF_KINDS])
def test_long_answers_take_time_in_proportion(name: str) -> None:
    family = family_named(name)
    delimiters = [*family.special_tokens, "<tool_call>"]
    tried = [("", delimiter[:-1]) for delimiter in sorted(delimiters, key=len)[-2:]]
    tried += [("", repeated) for repeated in REPEATED]
    tried += [(_opened(family), repeated) for repeated in REPEATED_IN_CALLS]
    for opening, repeated in tried[NAMES.index(name) % 3 :: 3]:  # the next families have the others
        # 8 times the input; the square of it would be 64. A busy machine gets another try
        slow = all(_growth(family, opening, repeated) > 24 for _ in range(3))
        assert not slow, f"{repeated!r} after {opening!r}"


def _opened(family: ModelFamily) -> str:
    """The beginning of a call, up to its first text."""
    outputs = (output for output in _outputs(family.name) if "Paris" in output)
    return next((output.partition("Paris")[0] for output in outputs), "")


def _growth(family: ModelFamily, opening: str, repeated: str) -> float:
    def seconds(size: int) -> float:
        text = opening + repeated * (size // len(repeated))
        wrote = _tokenized(Written(family, ((NO_TOKEN, text),), "", cut=False))
        units = wrote.as_cut(16)
        start = thread_time()
        wrote.read(units)
        return thread_time() - start

    # a floor, for what is too quick to be measured
    return seconds(LONG) / max(seconds(SHORT), 0.002)


@pytest.mark.parametrize("size", [1 << 14, 1 << 20])
def test_stop_tokens_again_and_again_take_time_in_proportion(size: int) -> None:
    def seconds(count: int) -> float:
        source = Source(stops=(STOP,))
        text = STOP * count + "x"
        start = thread_time()
        for at in range(0, len(text), size):
            source.feed(text[at : at + size])
        return thread_time() - start

    short, long = (seconds(count) for count in (4_000, 32_000))
    assert long < 24 * max(short, 0.002)


def test_arguments_of_a_long_call_are_whole() -> None:
    content = 'é\\n\\"x\\" <tool_call> {' * 10_000
    call = (
        f'<tool_call>{{"name": "write_file", "arguments": {{"path": "a", "content": "{content}"}}}}'
    )
    wrote = Written(family_named("plain"), ((NO_TOKEN, call + "</tool_call>"),), "", cut=False)
    (found,) = folded(wrote.read(wrote.as_cut(5))).calls
    assert found.arguments == {"path": "a", "content": json.loads(f'"{content}"')}
