"""What a template writes for calls and reasoning is cut out of its prompts, if it shows any."""

import pytest

from mlx_server import limits
from mlx_server.families.learned import (
    CALLS,
    CallSample,
    TemplateSamples,
    common_beginning,
    template_samples,
    whole_delimiters,
)
from mlx_server.sandbox.chat_template import ChatTemplate
from tests.families.by_template import PARTS, written

ONE, ALL, ARGUMENTS = (PARTS[part] for part in ("one", "all", "arguments"))
JSON = ('{"keyq": "valq1", "lastq": "valq2"}', '{"keyq": "valq3", "lastq": "valq4"}')


def samples(template: str) -> TemplateSamples:
    return template_samples(ChatTemplate(template), {})


def thinking(opening: str, closing: str) -> str:
    thought = "{%- if m.reasoning_content %}OPEN{{ m.reasoning_content }}CLOSE{%- endif %}"
    return written("", thought.replace("OPEN", opening).replace("CLOSE", closing))


@pytest.mark.parametrize(
    ("calls", "ones", "found"),
    [
        (
            ONE + '<call to="{{ f.name }}">' + ARGUMENTS + "</call>" + ALL,
            f'<call to="toolq">{JSON[0]}</call>',
            f'<call to="workq">{JSON[1]}</call>',
        ),
        (
            ONE + "<|fn|>{{ f.name }}<|with|>" + ARGUMENTS + "<|/fn|>" + ALL,
            f"<|fn|>toolq<|with|>{JSON[0]}<|/fn|>",
            f"<|fn|>workq<|with|>{JSON[1]}<|/fn|>",
        ),
        (
            ONE + "```{{ f.name }}\n" + ARGUMENTS + "\n```" + ALL,
            f"```toolq\n{JSON[0]}\n```",
            f"```workq\n{JSON[1]}\n```",
        ),
    ],
    ids=["tags", "control tokens", "fences"],
)
def test_a_turn_with_one_call_and_one_with_two(calls: str, ones: str, found: str) -> None:
    made = samples(written(calls))
    assert made.calls == (CallSample(ones, CALLS[:1]), CallSample(ones + found, CALLS))
    assert made.named == (), "there is nothing of the ids in them"
    assert made.thoughts is None


def test_a_template_that_renders_one_call_at_most_has_one_sample() -> None:
    refuses = "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{%- endif %}"
    made = samples(written(refuses + ONE + "<c>{{ f.name }}" + ARGUMENTS + "</c>" + ALL))
    assert [len(sample.calls) for sample in made.calls] == [1]


def test_ids_that_have_the_name_are_in_samples_of_their_own() -> None:
    made = samples(written(ONE + "<c>{{ c.id }}<a>" + ARGUMENTS + "</c>" + ALL))
    assert made.calls[0].written == f"<c>callzq000<a>{JSON[0]}</c>"
    assert [sample.written for sample in made.named] == [
        f"<c>functions.toolq:0<a>{JSON[0]}</c>",
        f"<c>functions.toolq:0<a>{JSON[0]}</c><c>functions.workq:1<a>{JSON[1]}</c>",
    ]


def test_calls_that_are_shown_with_their_results_alone_end_where_the_result_begins() -> None:
    template = (
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}{%- for c in messages[1].tool_calls %}"
        "{%- if c.id == m.tool_call_id %}<c>{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}</c><r>{%- endif %}{%- endfor %}"
        "{{ m.content }}</r>{%- elif not m.tool_calls %}<|{{ m.role }}|>{{ m.content }}"
        "{%- endif %}{%- endfor %}{#- tools -#}{%- if false %}{{ tools }}{%- endif %}"
    )
    made = samples(template)
    assert made.calls
    first = made.calls[0]
    assert not first.is_whole
    assert first.written.endswith(f"<c>toolq{JSON[0]}</c><r>")


@pytest.mark.parametrize(
    "calls",
    [
        "",
        "{{ m.tool_calls }}",
        ONE + "<c>{{ f.name }}</c>" + ALL,
        ONE + "<c>{{ f.name }}{{ f.arguments.keyq }}</c>" + ALL,
        "{{ raise_exception('no calls') }}",
    ],
    ids=["left out", "Python's repr", "no arguments", "half of them", "refused"],
)
def test_calls_that_are_not_rendered_for_the_model_are_no_samples(calls: str) -> None:
    assert samples(written(calls)).calls == ()


@pytest.mark.parametrize(
    ("opening", "closing", "found"),
    [
        ("<think>", "</think>", True),
        ("<think>\n", "\n</think>\n\n", True),
        ("[THINK]", "[/THINK]", True),
        ("<|begin_of_thought|>", "<|end_of_thought|>", True),
        ("<|START_THINKING|>", "<|END_THINKING|>", True),
        ("<open_thought>", "<close_thought>", True),
        ("<seed:think>", "</seed:think>", True),
        ("<think>", "<answer>", False),
        ("<think>", "<think>", False),
        ("", "", False),
        ("<think>", "", False),
        ("Thought: ", "\n", False),
        ("<think> so: ", "</think>", False),
    ],
)
def test_thoughts_have_two_delimiters_of_one_name(opening: str, closing: str, found: bool) -> None:
    pair = (opening.strip(), closing.strip())
    assert samples(thinking(opening, closing)).thoughts == (pair if found else None)


def test_a_template_that_takes_too_long_has_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_CHARACTERS", 100)
    assert samples("{{ 'x' * 1000 }}{% if false %}{{ tools }}{% endif %}") == TemplateSamples()


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [("", "a", ""), ("abc", "abd", "ab"), ("ab", "abc", "ab"), ("ab", "ab", "ab"), ("a", "b", "")],
)
def test_the_beginning_that_two_texts_share(one: str, other: str, common: str) -> None:
    assert common_beginning(one, other) == common_beginning(other, one) == common


@pytest.mark.parametrize(
    ("text", "whole"),
    [("a<b>", "a<b>"), ("a<b", "a"), ("a<b>c<", "a<b>c"), ("a>b", "a>b"), ("", ""), ("<", "")],
)
def test_a_delimiter_that_has_only_begun_is_cut_off(text: str, whole: str) -> None:
    assert whole_delimiters(text) == whole
