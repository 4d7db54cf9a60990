"""What the grammar of gpt-oss's answers allows, its parser reads as what was wanted."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mlx_server.errors import BadRequest
from mlx_server.events import Event, Repaired, TextDelta, ToolCallStarted
from mlx_server.families.harmony import GPT_OSS
from mlx_server.messages import Tool
from mlx_server.parsers.harmony_grammar import end_of_reasoning, grammar_after_reasoning
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.requests import ChoiceFormat, Format, JsonFormat, NamedTool, ToolChoice
from mlx_server.tool_parsers.call_format import finished_calls
from tests.families.goldens import goldens_of, tokenizer_of, tools
from tests.families.walks import Way, accepts, matcher_of

ADD = Tool(
    "add",
    "",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"$ref": "#/$defs/note"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"note": {"type": "string", "maxLength": 5}},
    },
)
ODD = Tool("an odd<|call|>näme", "", {"type": "object", "additionalProperties": False})
PYTHON, BROWSER = Tool("python", "", {}), Tool("browser", "", {})

THOUGHT = "<|channel|>analysis<|message|>Hm, {.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
NUMBER = JsonFormat({"type": "integer"})


def wanted(*given: Tool, choice: ToolChoice = "auto", format: Format | None = None) -> OutputSpec:
    control = tokenizer_of("gpt_oss").control_tokens
    return OutputSpec(ParseContext(tools=given, control=control), choice, format)


def grammar(*given: Tool, choice: ToolChoice = "auto", format: Format | None = None) -> str:
    found = GPT_OSS.grammar(wanted(*given, choice=choice, format=format))
    assert found
    return found.source


def allows(answer: str, *given: Tool, **more: Any) -> bool:
    return accepts("gpt_oss", grammar(*given, **more), answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "choice"),
    [
        (CALL, "auto"),
        ("<|channel|>commentary to=functions.add<|constrain|>json<|message|>", "required"),
        ("<|channel|>commentary to=functions.add<|message|>", NamedTool("add")),
        ("<|channel|>commentary to=functions.add code<|message|>", "auto"),
        ("<|channel|>commentary to=functions.add json<|message|>", "required"),
        (" to=functions.add<|channel|>commentary <|constrain|>json<|message|>", NamedTool("add")),
    ],
)
def test_calls_in_all_their_headers(call: str, choice: ToolChoice) -> None:
    for before in ("", THOUGHT, THOUGHT + THOUGHT):
        assert allows(before + call + '{"a": 1}', ADD, ODD, choice=choice)
    for wrong in ("{}", '{"a": "1"}', '{"a": 1, "b": 2}', '{"a": 1', "1", "", '{"a": 1} '):
        assert not allows(call + wrong, ADD, ODD, choice=choice)


@pytest.mark.parametrize(
    ("answer", "choices"),
    [
        (FINAL + "Yes.", {"auto", "none"}),
        (THOUGHT + FINAL, {"auto", "none"}),
        (THOUGHT + PREAMBLE + FINAL + "Yes.", {"auto", "none"}),
        (THOUGHT + PREAMBLE + CALL + '{"a": 1}', {"auto"}),
        (CALL + '{"a": 1}', {"auto", "required", "add"}),
        ("<|channel|>commentary to=functions.an_odd_call_näme<|message|>{}", {"auto", "required"}),
        (CALL.replace("add", "sub") + '{"a": 1}', set()),
        (CALL.replace("functions.", "") + '{"a": 1}', set()),
        ("<|channel|>analysis to=python code<|message|>x", set()),
        ("<|channel|>analysis<|message|>Hm.", set()),
        ("<|channel|>analysis to=functions.add<|message|>{}", set()),
        ("<|channel|>other<|message|>x", set()),
        ("Yes.", set()),
        (FINAL + "<|channel|>", set()),
        (CALL + '{"a": 1}<|end|><|start|>assistant' + CALL + '{"a": 1}', set()),
    ],
)
def test_what_each_choice_allows(answer: str, choices: set[str]) -> None:
    asked: list[ToolChoice] = ["auto", "none", "required", NamedTool("add")]
    found = {
        choice.name if isinstance(choice, NamedTool) else choice
        for choice in asked
        if allows(answer, ADD, ODD, choice=choice)
    }
    assert found == choices


@pytest.mark.parametrize("given", [(), (ADD,)])
def test_a_format_is_that_of_the_final_message(given: tuple[Tool, ...]) -> None:
    for header in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        assert allows(THOUGHT + header + "7", *given, format=NUMBER)
        assert not allows(THOUGHT + header + "x", *given, format=NUMBER)
    assert allows(FINAL + "b", *given, format=ChoiceFormat(("a", "b")))
    assert allows(CALL + '{"a": 1}', *given, format=NUMBER) is bool(given)
    assert not allows(CALL + '{"a": 1}', *given, format=NUMBER, choice="none")


def test_anything_is_allowed_where_nothing_was_asked() -> None:
    assert GPT_OSS.grammar(wanted()) is None


def test_a_choice_that_can_not_be_kept_is_refused() -> None:
    twins = (Tool("a b", "", {}), Tool("a_b", "", {}))
    assert allows("<|channel|>commentary to=functions.a_b<|message|>{}", *twins)
    with pytest.raises(BadRequest, match="Harmony can call none of the"):
        grammar(*twins, choice=NamedTool("a b"))


@pytest.mark.parametrize(
    ("choice", "end"),
    [
        ("auto", "<|end|><|start|>assistant"),
        ("none", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("required", "<|end|>"),
        (NamedTool("add"), "<|end|>"),
    ],
)
def test_the_end_of_reasoning_leads_on_in_the_grammar(choice: ToolChoice, end: str) -> None:
    assert end_of_reasoning(wanted(ADD, choice=choice)) == end
    at = matcher_of("gpt_oss", grammar(ADD, choice=choice))
    ids = tokenizer_of("gpt_oss").encode(f"<|channel|>analysis<|message|>Hm{end}")
    assert at.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("constrains", [True, False])
def test_after_reasoning_was_ended_the_model_may_call_or_answer(constrains: bool) -> None:
    rest = grammar_after_reasoning(wanted(ADD), constrains)
    assert rest
    source = rest.source
    for answer in (
        CALL + '{"a": 1}',
        " to=functions.add" + CALL.replace(" to=functions.add", "") + '{"a": 1}',
        PREAMBLE + CALL + '{"a": 1}',
        PREAMBLE + FINAL + "Yes.",
        FINAL + "Yes.",
    ):
        assert accepts("gpt_oss", source, answer), answer
    assert not accepts("gpt_oss", source, THOUGHT + FINAL + "Yes.")
    assert not accepts("gpt_oss", source, PREAMBLE + THOUGHT + FINAL + "Yes.")
    assert accepts("gpt_oss", source, CALL + '{"a": "1"}') is not constrains


@pytest.mark.parametrize("choice", ["none", "required", NamedTool("add")])
def test_where_there_is_no_choice_the_grammar_goes_on(choice: ToolChoice) -> None:
    assert grammar_after_reasoning(wanted(ADD, choice=choice), True) is None
    assert grammar_after_reasoning(wanted(), True) is None


def heard(ids: list[int], *given: Tool) -> list[Event]:
    parser = GPT_OSS.make_parser(ParseContext(tools=given))
    return [event for id in ids for event in parser.feed(id, "")] + parser.finish(cut=False)


WAY = Way(GPT_OSS, control=True)
CLOSING = ("<|end|><|start|>assistant", *'}]"0', "<|message|>", FINAL, CALL)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["auto", "required", NamedTool("add"), "none"])
@pytest.mark.parametrize("format", [None, NUMBER])
def test_what_is_allowed_is_read_as_wanted(choice: ToolChoice, format: Format | None) -> None:
    source = grammar(ADD, ODD, PYTHON, choice=choice, format=format)
    for seed in range(6):
        ids = WAY.walk(matcher_of("gpt_oss", source), seed, closing=CLOSING)
        said = f"seed {seed}: {tokenizer_of('gpt_oss').raw(ids)!r}"
        events = heard(ids, ADD, ODD, PYTHON)
        assert not [e for e in events if isinstance(e, Repaired) and e.what != "name"], said
        calls = finished_calls(events)
        assert len(calls) == sum(isinstance(e, ToolCallStarted) for e in events), said
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if choice == "none":
            assert not calls, said
        elif choice != "auto":
            assert (len(calls), text) == (1, ""), said
            assert not isinstance(choice, NamedTool) or calls[0]["name"] == choice.name, said
        for call in calls:
            schema = ADD.parameters if call["name"] == "add" else {"type": "object"}
            jsonschema.validate(call["arguments"], schema)
        if format and not calls:
            finals = tokenizer_of("gpt_oss").raw(ids).rpartition("<|message|>")[2]
            assert isinstance(json.loads(finals), int), said


SOUND = {
    "an answer without reasoning",
    "reasoning and text",
    "a call with its recipient behind the channel",
    "a call with its recipient behind the role",
    "a call without a content type",
    "an object and a list",
}
"""Golden outputs that are as Harmony has them."""


def test_sound_outputs_are_allowed() -> None:
    source = grammar(*tools())
    found = {
        golden.name for golden in goldens_of(GPT_OSS) if accepts("gpt_oss", source, golden.output)
    }
    assert found >= SOUND


# Answers that continue a message


def goes_on(header: str, answer: str, *given: Tool, **more: Any) -> bool:
    spec = wanted(*given, **more)
    context = replace(spec.context, ends_with=header, continues=True)
    found = GPT_OSS.grammar(replace(spec, context=context))
    assert found
    return accepts("gpt_oss", found.source, answer)


ANALYSIS, COMMENTARY = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary"))
NEXT = "<|end|><|start|>assistant"


def test_the_grammar_begins_within_the_message_that_the_prompt_began() -> None:
    assert goes_on(FINAL, " Rome.", ADD)
    assert goes_on(FINAL, "17", format=NUMBER)
    assert not goes_on(FINAL, "Rome", format=NUMBER)
    assert not goes_on(FINAL, f"{FINAL}17", format=NUMBER)
    for header in (ANALYSIS, COMMENTARY):
        assert goes_on(header, f" so.{NEXT}{FINAL}17", format=NUMBER)
        assert goes_on(header, f" so.{NEXT}{THOUGHT}{FINAL}17", format=NUMBER)
        assert goes_on(header, f' so.{NEXT}{CALL}{{"a": 1}}', ADD, choice="required")
        assert not goes_on(header, f" so.{NEXT}{FINAL}17", ADD, choice="required")
        assert not goes_on(header, "17", format=NUMBER)
