"""What becomes of a conversation before a chat template sees it, and how templates are asked."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.messages import Message, ToolCall
from mlx_server.prompts.history_rendering import as_json_array, as_python_list, in_hermes_tags
from mlx_server.prompts.message_normalization import (
    OwnText,
    Part,
    TemplateCapabilities,
    Turn,
    arguments_object,
    fallbacks,
    fit_to_template,
    to_turns,
)
from mlx_server.prompts.template_capabilities import default_system, template_capabilities
from mlx_server.prompts.template_prompt import as_given
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.slowness import slowness
from tests.tables import cases, messages_of


def call(id: str, name: str = "f", arguments: str = "{}") -> ToolCall:
    return ToolCall(id, name, arguments)


ROLES = {"developer": "system"}


def shown(turns: Sequence[Turn]) -> list[str]:
    """Each turn in a line: its role, its text, its calls."""
    return [f"{turn.role}: {_text(turn)}{_calls(turn.calls)}" for turn in turns]


def _text(turn: Turn) -> str:
    return "".join(map(_part, turn.parts))


def _part(part: Part) -> str:
    match part:
        case str():
            return part
        case OwnText(text):
            return text
    return f"<{_calls(part)}>"


def _calls(calls: Sequence[ToolCall]) -> str:
    return "".join(f"+{call.id}" for call in calls)


def given_to(manners: TemplateCapabilities, *messages: Message) -> list[str]:
    return shown(fit_to_template(to_turns(messages, ROLES, as_given), manners))


@cases
def test_a_conversation_takes_the_templates_shape(
    template: dict[str, Any], messages: list[Any], turns: list[str]
) -> None:
    """A turn is its role, its text and its calls."""
    capabilities = msgspec.convert(template, TemplateCapabilities)
    assert given_to(capabilities, *messages_of(messages)) == turns


@pytest.mark.slow
@pytest.mark.parametrize(
    "manners", [TemplateCapabilities(alternates=True), TemplateCapabilities(calls="single")]
)
def test_a_long_conversation_is_shaped_in_a_time_by_its_length(
    manners: TemplateCapabilities,
) -> None:
    """Each of many turns that looked at all the others would take minutes."""
    many = 40_000
    calls = tuple(ToolCall(str(i), "f", "{}") for i in range(many))
    results = [Message("tool", "x", tool_call_id="none") for _ in range(many)]
    users = [Message("user", "x")] * many
    turns = to_turns([*users, Message("assistant", tool_calls=calls), *results], ROLES, as_given)
    began = time.thread_time()
    fit_to_template(turns, manners)
    assert time.thread_time() - began < 6 * slowness()


WORDS = st.integers(0, 999).map("word{}".format)
IDS = st.sampled_from(["1", "2", "3"])
SAID = st.one_of(
    st.builds(Message, st.sampled_from(["system", "developer", "user", "assistant"]), WORDS),
    st.builds(Message, st.just("tool"), WORDS, tool_call_id=IDS),
    st.builds(
        Message,
        st.just("assistant"),
        st.just("") | WORDS,
        tool_calls=st.lists(st.builds(ToolCall, IDS, WORDS, st.just("{}")), min_size=1, max_size=3)
        .filter(lambda calls: len({call.id for call in calls}) == len(calls))
        .map(tuple),
    ),
)
MANNERS = st.builds(
    TemplateCapabilities,
    system=st.sampled_from(["anywhere", "first", "question", "never"]),
    alternates=st.booleans(),
    user_first=st.booleans(),
    calls=st.sampled_from(["many", "single", "never"]),
    text_with_calls=st.sampled_from(["together", "split", "never"]),
    results=st.sampled_from(["anywhere", "answers", "matched", "never"]),
    arguments=st.sampled_from(["any", "object", "text"]),
)


def words_of(message: Message) -> list[str]:
    return [message.content, *(call.name for call in message.tool_calls)]


def words_shown(turn: Turn) -> list[str]:
    text = " ".join(word for part in turn.parts for word in _words(part))
    return [*text.split(), *(call.name for call in turn.calls)]


def _words(part: Part) -> list[str]:
    match part:
        case str() | OwnText():
            return [_part(part)]
    return [call.name for call in part]


@pytest.mark.slow
@given(st.lists(SAID, max_size=8), MANNERS)
def test_whatever_the_manners_nothing_is_lost(
    messages: list[Message], manners: TemplateCapabilities
) -> None:
    numbered_words = [
        replace(
            message,
            content=message.content and f"{message.content}.{i}",
            tool_calls=tuple(
                replace(call, name=f"{call.name}.{i}.{n}")
                for n, call in enumerate(message.tool_calls)
            ),
        )
        for i, message in enumerate(messages)
    ]
    for plainer in fallbacks(manners):
        turns = fit_to_template(to_turns(numbered_words, ROLES, as_given), plainer)
        found = [word for turn in turns for word in words_shown(turn) if word.startswith("word")]
        assert sorted(found) == sorted(
            word for message in numbered_words for word in words_of(message) if word
        )


def test_arguments_that_are_nested_deeply_stay_text() -> None:
    """A prompt with them as an object would be refused, and so the whole history."""
    for depth, kind in ((30, dict), (60, str), (5000, str)):
        found = arguments_object('{"a": ' * depth + "1" + "}" * depth)
        assert isinstance(found, kind), depth
    assert isinstance(arguments_object(f'{{"a": [{", ".join(["{}"] * 99)}]}}'), dict)


TAGS = (("<think>", "</think>"),)


@cases
def test_reasoning_in_the_text_is_taken_out(text: str, reasoning: str, answer: str) -> None:
    (turn,) = to_turns([Message("assistant", text)], ROLES, as_given, TAGS)
    assert (turn.reasoning, "".join(map(str, turn.parts))) == (reasoning, answer)


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "<think>hm</think>yes"),
        Message("assistant", "<think>hm</think>yes", reasoning="other"),
    ],
)
def test_text_of_users_and_text_beside_reasoning_stays(message: Message) -> None:
    (turn,) = to_turns([message], ROLES, as_given, TAGS)
    assert turn.parts == ("<think>hm</think>yes",)
    assert turn.reasoning == (message.reasoning or "")


# Calls as text


def closed(text: str) -> str:
    return f"({text})"


CALLED = [call("1", "f", '{"a": "x\'", "b": [true, null]}'), call("2", "g", "[1]")]

WRITTEN: list[tuple[Callable[..., str], str]] = [
    (
        in_hermes_tags,
        '<tool_call>\n{"name": ("f"), "arguments": ({"a": "x\'", "b": [true, null]})}\n</tool_call>'
        '\n<tool_call>\n{"name": ("g"), "arguments": ([1])}\n</tool_call>',
    ),
    (
        as_json_array("<|a|>", "<|b|>"),
        '<|a|>[{"name": ("f"), "arguments": ({"a": "x\'", "b": [true, null]})}, '
        '{"name": ("g"), "arguments": ([1])}]<|b|>',
    ),
    (as_python_list("<|a|>", "<|b|>"), '<|a|>[(f(a="x\'", b=[True, None])), (g([1]))]<|b|>'),
]


@pytest.mark.parametrize(("write", "expected"), WRITTEN)
def test_calls_as_text_close_all_that_is_not_the_familys(
    write: Callable[..., str], expected: str
) -> None:
    assert write(CALLED, closed) == expected


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
EACH = "{% for m in messages %}"
END = "{% endfor %}"


@cases
def test_a_template_is_asked_for_its_manners(body: str, capabilities: dict[str, Any]) -> None:
    expected = msgspec.convert(capabilities, TemplateCapabilities)
    assert template_capabilities(ChatTemplate(TOOLS + EACH + body + END), {}) == expected


SAY = EACH + "{{ m.role }}: {{ m.content }}" + END


@cases
def test_a_template_may_render_the_schema_itself(source: str, expected: str) -> None:
    assert template_capabilities(ChatTemplate(source), {}).schema == expected


def test_the_system_prompt_of_a_template_that_has_its_own() -> None:
    own = "{% if messages[0].role != 'system' %}<s>Be kind. {{ day }}</s>{% endif %}"
    source = own + EACH + "{% if m.role == 'system' %}<s>{{ m.content }}</s>{% else %}"
    template = ChatTemplate(source + "<u>{{ m.content }}</u>{% endif %}" + END)
    assert default_system(template, {"day": "Monday"}) == "Be kind. Monday"
    assert default_system(ChatTemplate(SAY), {}) == ""
    refusing = "{% if messages | length < 2 %}{{ raise_exception('') }}{% endif %}"
    assert default_system(ChatTemplate(refusing + SAY), {}) == ""
