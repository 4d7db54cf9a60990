"""What of a conversation a template renders: golden prompts, arguments and settings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.json_families import PLAIN, SMOLLM2
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from tests.families import byte_level, checkpoint
from tests.families.prompts import CONVERSATIONS, GoldenPrompt, checkpoint_of, golden_prompts
from tests.prompts.template_prompts import (
    EACH,
    FUNCTION,
    OFFERED,
    TEMPLATED,
    offered,
    rendered_by,
    said,
)


@pytest.mark.parametrize(
    "arguments", ["[" * 65 + "]" * 65, "[" * 900 + "]" * 900, "[" * 100_000, "1" * 5000]
)
def test_arguments_that_no_template_can_use_stay_text(tmp_path: Path, arguments: str) -> None:
    template = EACH + "{% for c in m.tool_calls %}{{ c.function.arguments }}" + 2 * "{% endfor %}"
    prompted = checkpoint(tmp_path, byte_level(), template)
    call = ToolCall("1", "f", arguments)
    asked = Conversation((Message("assistant", tool_calls=(call,)),))
    tokens = PLAIN.render(prompted, asked).tokens
    assert prompted.tokenizer.decode(tokens) == arguments


def test_kwargs_that_the_template_does_not_read_are_reported(demo_everything: Checkpoint) -> None:
    kwargs = {"greeting": "Good day", "enable_thinking": True, "x": 1}
    rendered = PLAIN.render(demo_everything, replace(said(), template_kwargs=kwargs))
    assert rendered.ignored == ("chat_template_kwargs.enable_thinking", "chat_template_kwargs.x")
    assert demo_everything.tokenizer.decode(rendered.tokens).startswith("Good day\n")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_what_rendering_sets_itself_can_not_be_set(tmp_path: Path, name: str) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools is none }}"
        "{{ add_generation_prompt }}{{ range(2) | list }}{% if x %}{{ raise_exception('') }}"
        "{% endif %}"
    )
    prompted = replace(checkpoint(tmp_path, byte_level(), template), tokens={"bos_token": "<s>"})
    rendered = PLAIN.render(prompted, replace(said(), template_kwargs={name: [1]}))
    assert rendered.tokens == PLAIN.render(prompted, said()).tokens
    assert rendered.ignored == (f"chat_template_kwargs.{name}",)


def test_tools_that_the_template_has_no_place_for_are_reported_if_the_prompt_may_not_have_them(
    demo: Checkpoint, demo_everything: Checkpoint
) -> None:
    assert SMOLLM2.render(demo, offered()).ignored == ("tools",)
    assert SMOLLM2.render(demo, offered()).tokens == SMOLLM2.render(demo, said()).tokens
    assert PLAIN.render(demo_everything, offered()).ignored == ()


def test_without_a_chat_template_there_is_no_chat(demo: Checkpoint) -> None:
    with pytest.raises(BadRequest, match="chat_template") as caught:
        SMOLLM2.render(replace(demo, template=None), said())
    assert caught.value.param == "messages"


def test_every_family_has_golden_prompts() -> None:
    own_vocabulary = {"smollm2", "gpt_oss", "harmony_text"}
    assert {family.name for family in FAMILIES} - own_vocabulary == set(TEMPLATED)
    assert len(list(golden_prompts())) == len(TEMPLATED) * len(list(CONVERSATIONS.iterdir())) > 100


@pytest.mark.slow
@pytest.mark.parametrize("golden", list(golden_prompts()), ids=str)
def test_golden_prompts_of_every_family(golden: GoldenPrompt) -> None:
    assert golden.text() == golden.path.read_text("utf-8")


MIXTURE = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        st.sampled_from(["", "Hello", "<think>so</think>yes"]),
        reasoning=st.none() | st.just("so"),
        tool_call_id=st.sampled_from([None, "1", "2"]),
        tool_calls=st.lists(
            st.builds(
                ToolCall,
                st.sampled_from(["1", "2", "call_3"]),
                st.just("f"),
                st.sampled_from(['{"a": "b"}', "{}", "", "[1]", '{"a": ', "1"]),
            ),
            max_size=2,
        ).map(tuple),
    ).map(lambda m: m if m.role == "assistant" else replace(m, tool_calls=(), reasoning=None)),
    max_size=6,
)


REPLAYED = "smollm2"
"""Without a golden template, so it has the one that replay models have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [REPLAYED, *TEMPLATED])
@settings(max_examples=12)
@given(messages=MIXTURE)
def test_no_mixture_of_messages_is_refused(name: str, messages: list[Message]) -> None:
    asked = Conversation(tuple(messages), (Tool("f"),))
    assert family_named(name).render(checkpoint_of(name), asked).tokens


SAID = EACH + "{{ m.role }}: {{ m.content }};" + "{% endfor %}"


def test_tools_among_the_templates_options(tmp_path: Path) -> None:
    """As SmolLM3's takes tools for calls in JSON and, besides, functions for code in Python."""
    each = "{% for t in NAME or [] %}{{ t | string }};{% endfor %}"
    names = ("xml_tools", "python_tools")
    template = "|".join(each.replace("NAME", name) for name in names) + "{{ messages[0].content }}"
    tool = str({"type": "function", "function": json.loads(FUNCTION)})
    code: dict[str, Any] = {"python_tools": ["def f(x): ..."]}
    own = {"xml_tools": [{"name": "g"}], **code}
    for offer, kwargs, wanted in (
        (OFFERED, code, f"{tool};|def f(x): ...;Hello"),
        (OFFERED, own, "{'name': 'g'};|def f(x): ...;Hello"),
        (said(), own, "{'name': 'g'};|def f(x): ...;Hello"),
    ):
        conversation = replace(offer, template_kwargs=kwargs)
        assert rendered_by(template, tmp_path, conversation) == (wanted, ())


def effort(name: str, **kwargs: Any) -> Conversation:
    return replace(said(""), template_kwargs={"reasoning_effort": name, **kwargs})


def test_effort_by_the_templates_own_switch(tmp_path: Path) -> None:
    template = "{{ enable_thinking }}"
    assert rendered_by(template, tmp_path, effort("none")) == ("False", ())
    assert rendered_by(template, tmp_path, effort("low")) == ("True", ())
    assert rendered_by(template, tmp_path, said("")) == ("", ())
    asked = effort("none", enable_thinking="mine")
    assert rendered_by(template, tmp_path, asked) == ("mine", ())


def test_effort_that_the_template_reads_is_as_it_was_asked_for(tmp_path: Path) -> None:
    template = "{{ reasoning_effort }} {{ thinking }}"
    assert rendered_by(template, tmp_path, effort("xhigh")) == ("xhigh True", ())
    assert rendered_by(template, tmp_path, effort("much")) == ("much ", ())


def test_effort_that_the_template_refuses_is_the_nearest_that_it_takes(tmp_path: Path) -> None:
    template = (
        "{% set known = {'none': 1, 'high': 2} %}{% if reasoning_effort not in known %}"
        "{{ raise_exception('No such effort.') }}{% endif %}{{ reasoning_effort }}"
    )
    for asked, used in {"none": "none", "low": "high", "max": "high"}.items():
        assert rendered_by(template, tmp_path, effort(asked)) == (used, ())
    with pytest.raises(BadRequest, match="No such effort"):
        rendered_by(template, tmp_path, effort("much"))


def test_effort_by_a_word_of_the_systems(tmp_path: Path) -> None:
    template = "{% if '/no_think' in messages[0].content %}quiet {% endif %}" + SAID
    expected = "quiet system: /no_think;user: ;"
    assert rendered_by(template, tmp_path, effort("none")) == (expected, ())


def test_effort_that_nothing_can_be_made_of_is_reported(tmp_path: Path) -> None:
    ignored = ("chat_template_kwargs.reasoning_effort",)
    assert rendered_by(SAID, tmp_path, effort("none")) == ("user: ;", ignored)


def test_text_beside_calls_that_a_template_drops_is_reported(tmp_path: Path) -> None:
    template = EACH + (
        "{% if m.role == 'assistant' and loop.previtem.role == 'assistant' %}"
        "{{ raise_exception('') }}{% endif %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    call = ToolCall("1", "f", "{}")
    both = Message("assistant", "Let me look.", tool_calls=(call,))
    asked = Conversation((Message("user", "Hello"), both))
    text, ignored = rendered_by(template, tmp_path, asked)
    assert "Let me look." not in text
    assert ignored == ("messages[1].content",)


def test_a_refusal_is_told_only_when_nothing_plainer_is_taken(tmp_path: Path) -> None:
    refuses = (
        "{% if m.content == 'x' or m.role != 'user' %}{{ raise_exception(m.role) }}{% endif %}"
    )
    template = EACH + refuses + "{{ m.content }}{% endfor %}"
    asked = Conversation((Message("user", "a"), Message("tool", "b")))
    text, _ = rendered_by(template, tmp_path, asked)
    assert "a" in text
    assert "b" in text
    with pytest.raises(BadRequest, match="refuses these messages: user"):
        rendered_by(template, tmp_path, said("x"))


@pytest.mark.parametrize("lacks", ["foo()", "1|foo", "1 is foo"])
def test_a_branch_that_names_what_is_not_there_is_no_fault_of_the_request(
    tmp_path: Path, lacks: str
) -> None:
    branch = f"{{% if m.content == 'x' %}}{{{{ {lacks} }}}}{{% endif %}}"
    template = EACH + branch + "{{ m.content }}{% endfor %}"
    rendered_by(template, tmp_path, said("y"))
    with pytest.raises(ModelUnusable, match=r"template can't be used: .*foo.* `chat_template:`"):
        rendered_by(template, tmp_path, said("x"))
