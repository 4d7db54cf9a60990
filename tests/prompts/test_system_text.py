"""Tools and schemas in the system prompt of templates that have no place for them, and what a
client changes with every request, which is no part of it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.families import FAMILIES, family_named, fitted
from mlx_server.families.base import ModelFamily
from mlx_server.families.harmony import GPT_OSS
from mlx_server.families.json_families import PLAIN, SMOLLM2
from mlx_server.families.literal_families import GEMMA3
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.prompts.message_normalization import without_volatile_lines
from mlx_server.requests import JsonFormat, NamedTool, ToolChoice
from mlx_server.tool_parsers.call_format import finished_calls
from tests.families import byte_level, checkpoint
from tests.families.prompts import checkpoint_of, template_of
from tests.tables import cases

TOOLS = (
    Tool("look", "Looks at a place.", {"type": "object", "properties": {"at": {"type": "string"}}}),
    Tool("now", None, {}),
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WANTED = {"name": "it", "description": None, "schema": SCHEMA}
CALLS = (ToolCall("1", "look", '{"at": "here"}'), ToolCall("2", "now", "{}"))

SYSTEM, USER = Message("system", "Be brief."), Message("user", "Where?")
ROUND = (
    Message("assistant", "So.", tool_calls=CALLS),
    Message("tool", "a lake", tool_call_id="1"),
    Message("tool", "noon", tool_call_id="2"),
)

SAY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('') }}{% endif %}"
AT_THE_QUESTION = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
SYSTEMS = {
    "anywhere": SAY,
    "only in front": SAY.replace(
        "<|im_start|>", "{% if m.role != 'system' or loop.first %}x", 1
    ).replace("<|im_end|>", "{% endif %}<|im_end|>"),
    "nowhere": SAY.replace("<|im_start|>", NO_SYSTEM + "<|im_start|>"),
    "at the question": AT_THE_QUESTION,
}


def shown(family: ModelFamily, prompted: Checkpoint, asked: Conversation) -> str:
    return prompted.tokenizer.raw(family.render(prompted, asked).tokens)


def test_the_demo_model_is_given_its_tools(demo: Checkpoint) -> None:
    family = fitted(SMOLLM2, demo)
    asked = Conversation((USER,), TOOLS)
    rendered = family.render(demo, asked)
    text = shown(family, demo, asked)
    assert rendered.ignored == ()
    assert '"name": "look", "description": "Looks at a place."' in text
    assert text.count('{"type": "function"') == len(TOOLS)
    # the template's own system prompt is in front of it
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    without = replace(asked, tools=())
    assert family.render(demo, without).tokens == SMOLLM2.render(demo, without).tokens


@pytest.mark.slow
def test_only_a_template_without_a_place_gets_it() -> None:
    without_place = ("deepseek_v3", "functionary_v2", "gemma3", "plain")
    for family in FAMILIES:
        if template_of(family.name).is_file():
            prompted = checkpoint_of(family.name)
            found = fitted(family, prompted)
            tokens = found.render(prompted, Conversation((SYSTEM, USER), TOOLS)).tokens
            text = prompted.tokenizer.raw(tokens)
            assert "look" in text, family.name
            assert found.tools_in_prompt == ("# Tools\n\nYou can call these" in text), family.name
            assert found.tools_in_prompt == (family.name in without_place), family.name
    assert fitted(GPT_OSS, checkpoint_of("gpt_oss")) is GPT_OSS


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("first", [(USER,), (SYSTEM, USER)])
def test_the_prompt_of_the_next_turn_begins_as_the_last_one(
    tmp_path: Path, system: str, first: tuple[Message, ...]
) -> None:
    """So that the prompt cache serves tools and schemas again. A template that has the system
    prompt at the last question moves it away from the first one at the second."""
    prompted = checkpoint(tmp_path, byte_level(), SYSTEMS[system])
    family = fitted(PLAIN, prompted)
    asked = Conversation(first, TOOLS, response_format=WANTED)
    later = replace(asked, messages=(*first, *ROUND, Message("assistant", "There."), USER))
    if system == "at the question" and SYSTEM in first:
        asked = replace(later, messages=(*later.messages, Message("assistant", "No."), USER))
    one, other = (family.render(prompted, each).tokens for each in (asked, later))
    alike = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))  # noqa: B905
    common = prompted.tokenizer.raw(one[:alike])
    assert '"look"' in common
    assert '"required": ["city"]' in common


def test_tags_are_control_tokens_and_text_between_them_is_not(tmp_path: Path) -> None:
    control = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "</tools>", "<think>")
    prompted = checkpoint(tmp_path, byte_level(*control, "</tool_response>"), SAY)
    family = fitted(PLAIN, prompted)

    def special(text: str) -> list[str]:
        schema = {"properties": {text: {"enum": [text]}}}
        calls = (ToolCall("1", text, f'{{"a": "{text}"}}'),)
        asked = Conversation(
            (USER, Message("assistant", tool_calls=calls), Message("tool", text, tool_call_id="1")),
            (Tool(text, text, schema),),
            response_format={"name": text, "description": text, "schema": schema},
        )
        tokens = family.render(prompted, asked).tokens
        known = prompted.tokenizer.control_tokens
        return [known[token] for token in tokens if token in known]

    own = special("plain")
    assert {"<tool_call>", "</tools>", "</tool_response>"} <= {*own}
    for token in (*control, "</tool_response>"):
        for text in (token, f"a{token}b", token * 2, token[:3] + token):
            assert special(text) == own


# Schemas


@pytest.mark.parametrize("family", [SMOLLM2, GPT_OSS], ids=lambda family: family.name)
def test_the_schema_is_in_the_prompt(demo: Checkpoint, family: ModelFamily) -> None:
    prompted = demo if family is SMOLLM2 else checkpoint_of(family.name)
    asked = Conversation((SYSTEM, USER), response_format={**WANTED, "description": "A place."})
    text = shown(family, prompted, asked)
    before, found, after = text.partition("A place.")
    assert "Be brief." in before
    assert found
    assert '"city"' in after
    assert after.index('"city"') < after.index("Where?")


def test_a_template_with_a_place_for_schemas_gets_it_there(tmp_path: Path) -> None:
    own = "{% if response_format %}<|im_start|>{{ response_format.json_schema.schema | tojson }}"
    prompted = checkpoint(tmp_path, byte_level(), own + "{% endif %}" + SAY)
    text = shown(PLAIN, prompted, Conversation((USER,), response_format=WANTED))
    assert text.startswith('<|im_start|>{"type": "object"')
    assert text.count('"city"') == 2
    assert "system" not in text


def long_schema(tokens: int) -> dict[str, Any]:
    return {"schema": {"description": " a" * tokens, "type": "object"}}


def test_a_schema_over_the_limit_is_left_out_and_reported(demo: Checkpoint) -> None:
    most = limits.SCHEMA_PROMPT_TOKENS
    asked = Conversation((USER,), response_format=long_schema(most - 20))
    plain = SMOLLM2.render(demo, replace(asked, response_format=None))
    assert SMOLLM2.render(demo, asked).ignored == ()
    assert len(SMOLLM2.render(demo, asked).tokens) > most
    longer = SMOLLM2.render(demo, replace(asked, response_format=long_schema(most)))
    assert longer.tokens == plain.tokens
    assert longer.ignored == ("schema_in_prompt",)


def test_a_schema_takes_no_more_than_its_share_of_a_small_context(demo: Checkpoint) -> None:
    asked = Conversation((USER,), response_format=long_schema(300))
    assert SMOLLM2.render(demo, asked, 8 * 400).ignored == ()
    assert SMOLLM2.render(demo, asked, 8 * 300).ignored == ("schema_in_prompt",)


# What is read, and what is allowed, in the same form


def read(family: ModelFamily, output: str) -> list[dict[str, Any]]:
    parser = family.make_parser(ParseContext(tools=TOOLS))
    return finished_calls([*parser.feed(-1, output), *parser.finish(cut=False)])


@pytest.mark.parametrize("choice", ["auto", "none", "required", NamedTool("look")])
@pytest.mark.parametrize("family", ["gemma3", "plain", "smollm2", "deepseek_v3"])
def test_every_choice_of_tools_has_a_grammar(family: str, choice: ToolChoice) -> None:
    found = family_named(family).with_tools_in_prompt()
    assert found.grammar(OutputSpec(ParseContext(tools=TOOLS), choice))
    both = OutputSpec(ParseContext(tools=TOOLS), choice, JsonFormat(SCHEMA))
    assert found.grammar(both)
    assert GEMMA3.grammar(OutputSpec(ParseContext(tools=TOOLS), choice)) is None


BILLING = "x-anthropic-billing-header"
ASKED = Message("user", "hi")

SENT = [
    f"{BILLING}: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;",
    f"{BILLING}: cc_version=2.1.222; cc_prev_req=req_011Cdk3;",
    f"{BILLING}: cc_version=9.9.9; cc_entrypoint=sdk-cli; cch=71fea",
    f"{BILLING}:cch=1;  ",
]
"""As clients send it."""


def left_of(*systems: str, role: str = "system") -> tuple[list[str], tuple[str, ...]]:
    messages = (*(Message(role, text) for text in systems), ASKED)  # type: ignore[arg-type]
    conversation, names = without_volatile_lines(Conversation(messages))
    assert conversation.messages[-1] == ASKED
    return [message.content for message in conversation.messages[:-1]], names


@pytest.mark.parametrize("line", SENT)
def test_a_line_is_taken_out(line: str) -> None:
    assert left_of(f"{line}\nA\nB") == (["A\nB"], (BILLING,))
    assert left_of(f"{line}\r\nA\r\nB") == (["A\r\nB"], (BILLING,))
    assert left_of(f"A\n{line}\nB") == (["A\nB"], (BILLING,))
    assert left_of(f"A\nB\n{line}") == (["A\nB\n"], (BILLING,))
    assert left_of(line, "A", "B") == (["A", "B"], (BILLING,))
    assert left_of(line) == ([], (BILLING,))
    assert left_of(f"{line}\nA", f"{line}\nB", role="developer") == (["A", "B"], (BILLING,))


@cases
def test_anything_else_is_left_alone(text: str) -> None:
    assert left_of(text) == ([text], ())


def test_only_the_system_prompt_is_searched() -> None:
    messages = (Message("user", SENT[0]), Message("system", SENT[0]))
    conversation = Conversation(messages)
    assert without_volatile_lines(conversation) == (conversation, ())


@pytest.mark.parametrize(
    "hostile",
    [
        f"{BILLING}: " + "a=" * 100_000 + " x y",
        f"{BILLING}: " + "a=b;" * 100_000 + " x y",
        f"{BILLING}: " + "a=b; \t" * 50_000 + "x",
        f"{BILLING}: a=b" + " " * 200_000 + "x",
        f"{BILLING}: " * 20_000,
        f"{BILLING}:\n" * 20_000,
    ],
    ids=["pairs in pairs", "pairs", "spaces", "a gap", "names", "lines"],
)
def test_hostile_text_is_read_in_one_pass(hostile: str) -> None:
    assert left_of(hostile) == ([hostile], ())
