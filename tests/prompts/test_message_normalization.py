"""What becomes of a conversation before a chat template sees it, and how templates are asked."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.messages import Message, Role, ToolCall
from mlx_server.prompts.history_rendering import as_json_array, as_python_list, in_hermes_tags
from mlx_server.prompts.message_normalization import (
    EMPTY_TURN,
    MINIMAL,
    OwnText,
    Part,
    TemplateCapabilities,
    Turn,
    arguments_object,
    fallbacks,
    fit_to_template,
    to_turns,
)
from mlx_server.prompts.template_prompt import as_given
from tests.prompts.normalized import call
from tests.slowness import slowness

ROLES = {"developer": "system"}


def said(role: Role, text: str = "") -> Message:
    return Message(role, text or role)


def calling(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, tool_calls=calls)


def result(id: str, text: str = "") -> Message:
    return Message("tool", text or f"result {id}", tool_call_id=id)


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


SYSTEM, USER, ANSWER = said("system"), said("user"), said("assistant")

CASES: dict[str, tuple[TemplateCapabilities, tuple[Message, ...], list[str]]] = {
    "as it is": (
        TemplateCapabilities(),
        (SYSTEM, USER, ANSWER, said("developer", "later"), USER, calling(call("1")), result("1")),
        [
            "system: system",
            "user: user",
            "assistant: assistant",
            "system: later",
            "user: user",
            "assistant: +1",
            "tool: result 1",
        ],
    ),
    "the system first": (
        TemplateCapabilities(system="first"),
        (SYSTEM, said("developer"), USER, said("system", "later"), ANSWER),
        ["system: system\n\ndeveloper", "user: user", "user: later", "assistant: assistant"],
    ),
    "the system first, and by turns": (
        TemplateCapabilities(system="first", alternates=True),
        (SYSTEM, USER, said("system", "later"), USER, ANSWER, said("system", "last")),
        ["system: system", "user: user\n\nlater\n\nuser", "assistant: assistant", "user: last"],
    ),
    "no system": (
        TemplateCapabilities(system="never"),
        (SYSTEM, USER, ANSWER, said("system", "later"), USER),
        ["user: system\n\nuser", "assistant: assistant", "user: later", "user: user"],
    ),
    "no system, and nothing of a user": (
        TemplateCapabilities(system="never"),
        (SYSTEM, ANSWER),
        ["user: system", "assistant: assistant"],
    ),
    "the system at the last question": (
        TemplateCapabilities(system="question"),
        (SYSTEM, USER, ANSWER, said("user", "more"), calling(call("1")), result("1")),
        [
            "user: user",
            "assistant: assistant",
            "user: system\n\nmore",
            "assistant: +1",
            "tool: result 1",
        ],
    ),
    "the system at no question": (
        TemplateCapabilities(system="question"),
        (SYSTEM,),
        ["user: system"],
    ),
    "by turns": (
        TemplateCapabilities(alternates=True),
        (ANSWER, USER, said("user", "more"), ANSWER, said("assistant", "more")),
        [
            f"user: {EMPTY_TURN}",
            "assistant: assistant",
            "user: user\n\nmore",
            "assistant: assistant\n\nmore",
        ],
    ),
    "by turns, and calls are not counted": (
        TemplateCapabilities(alternates=True),
        (USER, calling(call("1")), result("1"), USER, ANSWER, calling(call("2")), result("2")),
        [
            "user: user",
            "assistant: +1",
            "tool: result 1",
            f"assistant: {EMPTY_TURN}",
            "user: user",
            "assistant: assistant+2",
            "tool: result 2",
        ],
    ),
    "by turns, and nobody speaks": (
        TemplateCapabilities(alternates=True),
        (),
        [f"user: {EMPTY_TURN}"],
    ),
    "a user first": (
        TemplateCapabilities(user_first=True),
        (SYSTEM, calling(call("1")), result("1")),
        ["system: system", f"user: {EMPTY_TURN}", "assistant: +1", "tool: result 1"],
    ),
    "one call at a time": (
        TemplateCapabilities(calls="single"),
        (
            USER,
            calling(call("1"), call("2"), call("3"), text="look"),
            result("2"),
            result("9"),
            result("1"),
            USER,
            result("3"),
        ),
        [
            "user: user",
            "assistant: look+1",
            "tool: result 1",
            "assistant: +2",
            "tool: result 2",
            "assistant: +3",
            "tool: result 9",
            "user: user",
            "tool: result 3",
        ],
    ),
    "no calls": (
        TemplateCapabilities(calls="never"),
        (calling(call("1"), call("2"), text="look"), result("1"), calling(call("3"))),
        ["assistant: look\n<+1+2>", "tool: result 1", "assistant: <+3>"],
    ),
    "no results": (
        TemplateCapabilities(calls="never", results="never"),
        (calling(call("1")), result("1", "x")),
        ["assistant: <+1>", "user: <tool_response>\nx\n</tool_response>"],
    ),
    "results after calls only": (
        TemplateCapabilities(results="answers"),
        (result("1", "x"), calling(call("1")), result("1"), result("9"), USER, result("1", "y")),
        [
            "user: <tool_response>\nx\n</tool_response>",
            "assistant: +1",
            "tool: result 1",
            "tool: result 9",
            "user: user",
            "user: <tool_response>\ny\n</tool_response>",
        ],
    ),
    "results by the id of a call only": (
        TemplateCapabilities(results="matched"),
        (calling(call("1"), call("2")), result("9", "x"), result("2")),
        ["assistant: +1+2", "user: <tool_response>\nx\n</tool_response>", "tool: result 2"],
    ),
    "no text beside calls": (
        TemplateCapabilities(text_with_calls="split"),
        (calling(call("1"), text="look"), calling(call("2")), ANSWER),
        ["assistant: look", "assistant: +1", "assistant: +2", "assistant: assistant"],
    ),
    "arguments that are no object": (
        TemplateCapabilities(arguments="object", results="answers"),
        (calling(call("1", arguments="[1]")), result("1", "x"), calling(call("2"))),
        ["assistant: <+1>", "user: <tool_response>\nx\n</tool_response>", "assistant: +2"],
    ),
    "arguments that are not JSON": (
        TemplateCapabilities(arguments="object"),
        (calling(call("1", arguments='{"a": '), call("2")),),
        ["assistant: <+1+2>"],
    ),
    "arguments of any kind": (
        TemplateCapabilities(),
        (calling(call("1", arguments='{"a": ')),),
        ["assistant: +1"],
    ),
    "only users and assistants": (
        MINIMAL,
        (SYSTEM, calling(call("1")), result("1", "x"), USER),
        ["user: system", "assistant: <+1>", "user: <tool_response>\nx\n</tool_response>\n\nuser"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_takes_the_templates_shape(name: str) -> None:
    manners, messages, expected = CASES[name]
    assert given_to(manners, *messages) == expected


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


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("\n<think>hm</think>yes", "hm", "yes"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>hm</think>", "hm", ""),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>hm", "", "<think>hm"),
        ("yes</think>", "", "yes</think>"),
        ("so <think>hm</think>", "", "so <think>hm</think>"),
        ("[THINK]hm[/THINK]yes", "", "[THINK]hm[/THINK]yes"),
    ],
)
def test_reasoning_in_the_text_is_taken_out(text: str, reasoning: str, answer: str) -> None:
    (turn,) = to_turns([said("assistant", text)], ROLES, as_given, TAGS)
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
