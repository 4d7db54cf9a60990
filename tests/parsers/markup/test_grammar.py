"""The grammars of whole answers: what they allow is what the family's parser reads."""

import json
from dataclasses import replace

import jsonschema
import pytest

from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.families.literal_families import LLAMA3
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import THINK, OutputSpec
from mlx_server.requests import (
    ChoiceFormat,
    Format,
    GrammarFormat,
    JsonFormat,
    NamedTool,
    RegexFormat,
    ToolChoice,
)
from mlx_server.tool_parsers.call_format import UncallableTool
from tests.contract.pairs import KINDS
from tests.families.goldens import Golden, goldens_of, tools
from tests.families.walks import Way
from tests.parsers.markup.ways import (
    PERSON,
    WAYS,
    WITH_CALLS,
    assert_valid,
    called,
    calls_of,
    every_way,
    in_tokens,
    refused,
    text_of,
    walked,
)
from tests.tables import cases

# What models write


def is_held_to(family: ModelFamily, case: Golden, *, control: bool) -> bool:
    """Whether its calls are of offered tools, and written as they should be."""
    marks = family.layout_with(tools()).calls
    said = json.dumps([call.arguments for call in case.reads.calls], ensure_ascii=False)
    spelled = Way(family, control).control_tokens.values()
    return not (
        case.loose
        or case.reads.repairs
        or (case.reads.unfinished and not case.cut)
        or any(mark in case.reads.text for mark in marks)  # about calls, and none
        or any(token in said for token in spelled)  # in a string, where text is no control token
        or r"\u" in case.output  # grammars have JSON's strings without such escapes
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.name)
def test_what_models_write_is_allowed_and_no_call_where_none_may_be(family: ModelFamily) -> None:
    wrong: list[tuple[str, bool, str]] = []
    for case in goldens_of(family):
        for control in (True, False) if case.by_text else (True,):
            if is_held_to(family, case, control=control):
                if reported := refused(family, case, control=control):
                    wrong.append((case.name, control, reported))
                if case.reads.calls and not refused(family, case, "none", control=control):
                    wrong.append((case.name, control, "a call where none may be"))
    assert not wrong


# What is constrained


REQUIRED = [
    pytest.param(way, thinks, id=f"{called(way)}-{thinks}")
    for way in WAYS
    for thinks in (False, True)
    # a thought may come before the same calls: their rules go with every family, and that they
    # stand alone with one of each kind
    if thinks or way.family.name in KINDS
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "thinks"), REQUIRED)
def test_what_is_required_is_calls_and_nothing_else(way: Way, thinks: bool) -> None:
    wanted = OutputSpec(way.reading(tools()), "required", thinks=thinks)
    for said, events in walked(way, wanted, 3):
        calls = calls_of(events)
        assert calls, said
        assert not text_of(events), said
        assert_valid(calls, tools())


@pytest.mark.slow
@every_way
def test_a_named_tool_is_called_once(way: Way) -> None:
    wanted = OutputSpec(way.reading(tools()), NamedTool("search"), thinks=True)
    for said, events in walked(way, wanted, 2):
        calls = calls_of(events)
        assert [name for name, _ in calls] == ["search"], said
        assert not text_of(events), said
        assert_valid(calls, tools())


QUERY = {"query": "what is </think>?"}
BARE_CALLS = {
    "llama3": json.dumps({"name": "search", "parameters": QUERY}),
    "glm4": f"search\n{json.dumps(QUERY)}",
}
BARE = [way for way in WAYS if way.family.name in BARE_CALLS]


@pytest.mark.parametrize("way", BARE, ids=called)
@pytest.mark.parametrize("choice", ["required", NamedTool("search")])
def test_a_thought_that_mentions_its_tag_ends_before_a_bare_call(
    way: Way, choice: ToolChoice
) -> None:
    wanted = OutputSpec(way.reading(tools()), choice, thinks=True)
    call = BARE_CALLS[way.family.name]
    said = way.encode(f"<think>A tag, <think>, opens a thought.</think>{call}")
    assert way.matcher(wanted).validate_tokens(said) == len(said)
    assert calls_of(way.read(wanted.context, said)) == [("search", QUERY)]


TAGGED = [
    way
    for way in WAYS
    for layout in [way.family.layout_with(tools())]
    if THINK in layout.reasoning and not layout.calls_end_reasoning
]


@pytest.mark.slow
@pytest.mark.parametrize("space", ["", "\n\n"])
@pytest.mark.parametrize("way", TAGGED, ids=called)
def test_calls_in_a_thought_are_not_constrained(way: Way, space: str) -> None:
    matcher = way.matcher(OutputSpec(way.reading(tools()), "auto", thinks=True))
    marks = " or ".join(way.family.layout_with(tools()).calls)
    said = way.encode(f"{space}<think>\nI could write {marks} here.\n</think>\n\nNo.")
    assert matcher.validate_tokens(said) == len(said)


@pytest.mark.slow
@every_way
def test_a_call_once_begun_is_valid(way: Way) -> None:
    wanted = OutputSpec(way.reading(tools()), "auto", thinks=True)
    notations = way.family.layout_with(tools()).call_formats
    for begun in {mark for n in notations if n.blocks for mark in (*n.opens, *n.begins)}:
        for _, events in walked(way, wanted, 2, "Well. " * (not begun) + begun):
            assert_valid(calls_of(events), tools())


WITHOUT_END = ("functionary", "functionary_v2", "gigachat", "granite_code")
UNCLOSED = [way for way in WAYS if way.family.name in WITHOUT_END]


@pytest.mark.parametrize("way", UNCLOSED, ids=called)
def test_nothing_that_makes_a_call_doubtful_follows_it(way: Way) -> None:
    """As the rest of a string does whose quotes were not escaped."""
    call = next(
        case for case in goldens_of(way.family) if case.name == "an object that no schema describes"
    )
    matcher = way.matcher(OutputSpec(way.reading(tools()), "auto", thinks=True))
    said = way.encode(call.output)
    assert matcher.validate_tokens(said) == len(said)
    rest = way.encode(')"}"')
    assert matcher.validate_tokens([*said, *rest]) < len(said) + len(rest)


HEADERS = {
    "functionary": (">>>", "\n"),
    "functionary_v2": ("\n<|from|>assistant\n<|recipient|>", "\n<|content|>"),
}
FUNCTIONARY_WAYS = [way for way in WAYS if way.family.name in HEADERS]


@pytest.mark.parametrize("before", ["", "Well.", "all{}Well.", 'search{}{{"query": "a"}}'])
@pytest.mark.parametrize("way", FUNCTIONARY_WAYS, ids=called)
def test_every_call_of_an_answer_is_constrained(way: Way, before: str) -> None:
    matcher = way.matcher(OutputSpec(way.reading(tools()), "auto", thinks=True))
    mark, ends = HEADERS[way.family.name]
    begun = before.format(ends) + mark if before else ""
    valid, broken = (
        way.encode(f'{begun}search{ends}{{"query": {value}}}') for value in ('"b"', "5")
    )
    assert matcher.validate_tokens(valid) == len(valid)
    assert matcher.validate_tokens(broken) < len(broken)


@every_way
def test_no_call_is_opened_where_none_may_be(way: Way) -> None:
    wanted = OutputSpec(way.reading(tools()), "none", thinks=True)
    for said, events in walked(way, wanted, 4):
        assert not calls_of(events), said


def test_where_nothing_is_wanted_there_is_no_grammar() -> None:
    for way in WAYS:
        assert way.family.grammar(OutputSpec(way.reading(()))) is None
        assert way.family.grammar(OutputSpec(way.reading(()), "none")) is None


# Thinking


THINKING = [way for way in WAYS if way.control and way.family.thinking_delimiters()[0]]


@pytest.mark.parametrize("way", THINKING, ids=called)
def test_what_leads_on_from_reasoning_may_be_put_in(way: Way) -> None:
    opens, _ = way.family.thinking_delimiters()
    reading = way.reading(tools(), opens[0])
    for wanted in (
        OutputSpec(reading, "required"),
        OutputSpec(reading, "none", JsonFormat(PERSON)),
    ):
        matcher = way.matcher(wanted)
        led = way.encode("So" + way.family.answer_prefix.rstrip())
        assert matcher.validate_tokens(led) == len(led)


@pytest.mark.parametrize("way", THINKING, ids=called)
def test_no_answer_ends_in_reasoning_that_is_to_be_followed(way: Way) -> None:
    opens, _ = way.family.thinking_delimiters()
    matcher = way.matcher(OutputSpec(way.reading(tools(), opens[0]), "required"))
    layout = way.family.layout_with()
    own = [*layout.calls, *sum(layout.reasoning, ()), *layout.dropped]
    own += [
        mark for notation in layout.call_formats for mark in (*notation.closes, *notation.inner)
    ]
    for id, token in way.control_tokens.items():
        if not any(token in mark for mark in own):
            assert not matcher.validate_tokens([id]), token
    assert matcher.validate_tokens(way.encode("So")) == 2


def test_a_text_that_goes_on_is_free_where_a_new_one_would_be_a_call() -> None:
    way = Way(LLAMA3, control=True)
    begun = way.encode('{"name": "add", "parameters": nonsense')
    new = way.reading(tools())
    assert way.matcher(OutputSpec(new, "auto")).validate_tokens(begun) < len(begun)
    continued = replace(new, continues=True)
    assert way.matcher(OutputSpec(continued, "auto")).validate_tokens(begun) == len(begun)


@pytest.mark.slow
@in_tokens
@pytest.mark.parametrize("thinks", [True, False])
def test_no_token_that_ends_an_answer_comes_before_the_call(way: Way, thinks: bool) -> None:
    """Delimiters without a meaning may come first, and some of them end a turn."""
    matcher = way.matcher(OutputSpec(way.reading(tools()), "required", thinks=thinks))
    assert not {*way.allowed(matcher)} & {*way.vocabulary.stop_tokens}


# What a grammar allows of an answer in a format, of difficult schemas and of names.


PEOPLE = jsonschema.Draft202012Validator(PERSON)


def ends_of(way: Way) -> list[str]:
    """Of prompts: some open a thought, if the family has any."""
    return ["", *way.family.thinking_delimiters()[0][:1]]


ENDS = [pytest.param(way, end, id=f"{called(way)}-{end}") for way in WAYS for end in ends_of(way)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "end"), ENDS)
def test_text_follows_its_schema_also_behind_reasoning(way: Way, end: str) -> None:
    wanted = OutputSpec(way.reading((), end), format=JsonFormat(PERSON), thinks=True)
    for said, events in walked(way, wanted, 4):
        assert not calls_of(events)
        assert PEOPLE.is_valid(json.loads(text_of(events))), said


BLANK = (" yes", "\n\nno", "\n", "perhaps ")


FORMATS: dict[str, Format] = {
    "choice": ChoiceFormat(BLANK),
    "regex": RegexFormat(r" yes|\n\nno|\n|perhaps "),
    "grammar": GrammarFormat('start: " yes" | "\\n\\nno" | "\\n" | "perhaps "'),
}
IN_FORMATS = [
    pytest.param(way, end, format, id=f"{called(way)}-{end}-{name}")
    for way in WAYS
    for end in ends_of(way)
    for name, format in FORMATS.items()
    # what stands before and after an answer is the family's, and its text the format's: one
    # format goes with every family, the others with one of each kind
    if name == "choice" or (way.control and way.family.name in KINDS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "end", "format"), IN_FORMATS)
def test_text_keeps_the_white_space_of_its_format(way: Way, end: str, format: Format) -> None:
    wanted = OutputSpec(way.reading((), end), format=format, thinks=True)
    for said, events in walked(way, wanted, 4):
        assert text_of(events) in BLANK, said


@pytest.mark.slow
@in_tokens
def test_calls_or_text_of_a_format(way: Way) -> None:
    wanted = OutputSpec(way.reading(tools()), "auto", JsonFormat(PERSON))
    both = set()
    for said, events in walked(way, wanted, 8):
        calls, text = calls_of(events), text_of(events)
        assert bool(calls) is not bool(text.strip()), said
        assert_valid(calls, tools())
        if text.strip():
            jsonschema.validate(json.loads(text), PERSON)
        both.add(bool(calls))
    assert both


def test_a_call_of_a_format_without_delimiters_may_take_a_formatted_texts_place() -> None:
    """Their first keys are the same, and the tool's schema has references."""
    path = Tool("path", "", {"properties": {"at": {"$ref": "#/$defs/x"}}, "required": ["at"],
                             "$defs": {"x": {"type": "integer"}}})  # fmt: skip
    way = Way(LLAMA3, control=True)
    wanted = OutputSpec(way.reading([path]), "auto", JsonFormat(PERSON))
    matcher = way.matcher(wanted)
    for said, is_allowed in {
        '{"name": "Ada", "born": 1815}': True,
        '{"name": "path", "parameters": {"at": 5}}': True,
        '{"name": "path", "parameters": {"at": "5"}}': False,
        '{"name": "path", "born": 1815}': False,
    }.items():
        tokens = way.encode(said)
        assert (matcher.deep_copy().validate_tokens(tokens) == len(tokens)) is is_allowed, said


def test_a_call_that_begins_with_its_tools_name_may_take_a_formatted_texts_place() -> None:
    way = next(way for way in WAYS if way.family.name == "functionary")
    matcher = way.matcher(OutputSpec(way.reading(tools()), "auto", JsonFormat(PERSON)))
    called = f"{tools()[0].name}\n{{"
    for said, is_allowed in {called: True, '{"name": "': True, "Certainly": False}.items():
        tokens = way.encode(said)
        assert (matcher.deep_copy().validate_tokens(tokens) == len(tokens)) is is_allowed, said


def nasty(way: Way) -> list[Tool]:
    marks = [*way.family.layout_with(tools()).calls, *way.family.thinking_delimiters()[1]]
    keys = [f"key_{n}" for n in range(40)]
    return [
        Tool("empty", "", {}),
        Tool(
            "enums",
            "",
            {
                "type": "object",
                "properties": {"mark": {"enum": [*marks, "a]", '"', "</x>", "ü🙂"]}},
                "required": ["mark"],
                "additionalProperties": False,
            },
        ),
        Tool(
            "many",
            "",
            {
                "type": "object",
                "properties": {key: {"type": "integer"} for key in keys},
                "required": keys[:2],
                "additionalProperties": False,
            },
        ),
        Tool(
            "nested",
            "",
            {
                "type": "object",
                "properties": {"tree": {"$ref": "#/$defs/node"}},
                "required": ["tree"],
                "additionalProperties": False,
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {
                            "value": {"type": "boolean"},
                            "next": {"$ref": "#/$defs/node"},
                        },
                        "required": ["value"],
                        "additionalProperties": False,
                    }
                },
            },
        ),
    ]


@pytest.mark.slow
@every_way
def test_difficult_schemas(way: Way) -> None:
    offered = nasty(way)
    wanted = OutputSpec(way.reading(offered), "required")
    for said, events in walked(way, wanted, 3):
        calls = calls_of(events)
        assert calls, said
        assert not text_of(events), said
        assert_valid(calls, offered)


NAMES = ('a"b', "x]<tool_call>", "ü 🙂", "back\\slash/{}\n")

KEYS = {
    'a"b': {"type": "string"},
    "</tool_call>": {"type": "integer"},
    "ü🙂": {"type": "boolean"},
    "": {"type": "null"},
    "[x]": {"type": "number"},
}


@pytest.mark.slow
@every_way
def test_difficult_names_are_written_or_refused_by_name(way: Way) -> None:
    for name in NAMES:
        offered = [Tool(name, "", {"type": "object", "properties": KEYS, "required": ['a"b']})]
        wanted = OutputSpec(way.reading(offered), "required")
        try:
            grammar = way.family.grammar(wanted)
        except UncallableTool:
            continue
        if grammar is None:  # functionary's names end with their line
            assert "\n" in name
            continue
        said = way.walk(way.matcher(wanted), seed=1)
        events = way.read(wanted.context, said)
        assert calls_of(events), way.spelled(said)
        assert not text_of(events), way.spelled(said)
        assert_valid(calls_of(events), offered)


@pytest.mark.slow
@in_tokens
def test_many_tools_compile(way: Way) -> None:
    parameters = tools()[5].parameters
    offered = [Tool(f"tool_{n}", "", parameters) for n in range(128)]
    # other choices make other rules around the same calls: the same in all families of a kind
    for choice in ("auto", "required", "none") if way.family.name in KINDS else ("auto",):
        way.matcher(OutputSpec(way.reading(offered), choice))


TWO = MarkupLayout(reasoning=(THINK, ("<seed:think>", "</seed:think>"), ("[A]\n", "[/A]")))
LAYOUTS = [pytest.param(each.layout_with(), id=each.name) for each in FAMILIES]


@cases
def test_the_prompts_end_may_open_reasoning(ends_with: str, expected: str | None) -> None:
    assert TWO.inside(ends_with) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_family_has_a_delimiter_that_is_found_everywhere(layout: MarkupLayout) -> None:
    """An empty one, or one of white space, would open reasoning at the end of each prompt."""
    for delimiter in (*layout.opens_reasoning, *layout.ends_of_reasoning, *layout.calls):
        assert delimiter.strip()
