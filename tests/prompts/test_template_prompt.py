"""Conversations to prompts. Above all: text is never control."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.json_families import PLAIN, SMOLLM2
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.prompts.control_token_guard import ControlTokenGuard
from mlx_server.prompts.template_capabilities import EFFORTS, effort_word, efforts_to_try, switches
from tests.families import CONTROL, SAMPLES, byte_level, checkpoint, full_width
from tests.families.prompts import CONVERSATIONS, GoldenPrompt, checkpoint_of, golden_prompts
from tests.prompts.template_prompts import (
    ALL,
    EACH,
    FUNCTION,
    OFFERED,
    TEMPLATED,
    added_tokens,
    called,
    control_tokens,
    offered,
    raw,
    rendered_by,
    said,
    text_of,
)
from tests.tables import cases

FIELDS: dict[str, Callable[[str], Conversation]] = {
    "content": said,
    "system": lambda text: Conversation((Message("system", text), Message("user", "Hello"))),
    "name": lambda text: said(name=text),
    "reasoning": lambda text: Conversation((Message("assistant", "Hello", reasoning=text),)),
    "tool call id": lambda text: called(id=text),
    "tool call name": lambda text: called(name=text),
    "tool call argument": lambda text: called(arguments={"a": [text]}),
    "tool call argument's name": lambda text: called(arguments={text: 1}),
    "tool call argument alone": lambda text: called(arguments=text),
    "tool result": lambda text: Conversation((Message("tool", text, tool_call_id="1"),)),
    "tool_call_id": lambda text: Conversation((Message("tool", "Hello", tool_call_id=text),)),
    "tool name": lambda text: offered(name=text),
    "tool description": lambda text: offered(description=text),
    "schema value": lambda text: offered(parameters={"a": {"enum": [text]}}),
    "schema key": lambda text: offered(parameters={text: {text: 1}}),
    "template kwarg": lambda text: replace(said(), template_kwargs={"greeting": text}),
    "nested template kwarg": lambda text: replace(
        said(), template_kwargs={"greeting": {"deep": [text]}}
    ),
}

EMBEDDINGS: dict[str, Callable[[str], str]] = {
    "alone": lambda token: token,
    "in words": lambda token: f"be{token}fore",
    "in a line": lambda token: f"One {token} two\n",
    "doubled": lambda token: token + token,
    "nested": lambda token: token[:5] + token + token[5:],
    "overlapping": lambda token: token[:-1] + token + token[1:],
}


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_no_special_token_comes_from_text(demo_everything: Checkpoint, field: str) -> None:
    conversation = FIELDS[field]
    special = added_tokens(demo_everything.path).values()
    assert len(special) == 17
    for embed in EMBEDDINGS.values():
        own = control_tokens(demo_everything, conversation(embed("plain words")))
        for token in special:
            assert control_tokens(demo_everything, conversation(embed(token))) == own


JOINS = {
    "fields": "{{ m.name }}{{ m.content }}",
    "sum": "{{ m.name + m.content }}",
    "concatenation": "{{ m.name ~ m.content }}",
    "format": "{{ '{}{}'.format(m.name, m.content) }}",
    "percent": "{{ '%s%s' % (m.name, m.content) }}",
    "join": "{{ [m.name, m.content] | join }}",
    "trim": "{{ m.name | trim }}{{ m.content | trim }}",
    "set": "{% set both = m.name + m.content %}{{ both }}",
    "json": "{{ (m.name + m.content) | tojson }}",
    "ascii json": "{{ (m.name + m.content) | tojson(ensure_ascii=True) }}",
    "repr": "{{ [m.name + m.content] }}",
    "lower": "{{ (m.name + m.content) | lower }}",
    "upper": "{{ (m.name + m.content) | upper }}",
    "reverse": "{{ (m.content | reverse) + (m.name | reverse) }}",
    "replace": "{{ (m.name + m.content) | replace('-', '_') }}",
    "removal": "{{ (m.name + m.content) | replace('*', '') }}",
    "split": "{{ (m.name + m.content).split('*') | join }}",
    "list": "{{ (m.name + m.content) | list | join }}",
}

FORMS: tuple[Callable[[str], str], ...] = (
    lambda token: token,
    lambda token: token.replace("_", "-"),
    lambda token: "*".join(token),
    lambda token: token[:4] + "*" + token[4:],
    lambda token: token.swapcase(),
    lambda token: token[::-1],
)


@pytest.mark.slow
@pytest.mark.parametrize("how", JOINS)
def test_fields_that_a_template_joins_make_no_control_token(tmp_path: Path, how: str) -> None:
    prompted = checkpoint(tmp_path, byte_level(), EACH + JOINS[how] + ALL)
    for token in CONTROL:
        for form in FORMS:
            text = form(token)
            for cut in range(len(text) + 1):
                attack = Conversation((Message("system", text[cut:], name=text[:cut] or " "),))
                assert control_tokens(prompted, attack) == ["<|im_end|>"]


@pytest.mark.parametrize("how", ["json", "ascii json", "repr"])
def test_no_mark_is_seen_where_a_template_escapes(tmp_path: Path, how: str) -> None:
    prompted = checkpoint(tmp_path, byte_level(), EACH + JOINS[how] + ALL)
    expected = {"json": '"<|im_end|>[ü]"', "ascii json": '"<|im_end|>[\\u00fc]"'}
    tokens = PLAIN.render(prompted, said("end|>[ü]", name="<|im_")).tokens
    assert text_of(prompted, tokens) == expected.get(how, "['<|im_end|>[ü]']") + "<|im_end|>"


FRAMES = {
    "<{{ m.name }}>": ("think", "/think", "s", "|im_end|", "|im_end|><", "><|im_end|"),
    "</{{ m.name }}>": ("think", "Think", " think "),
    "<|{{ m.name }}|>": ("im_end", "im_start", "im_end|><|im_end"),
    "[{{ m.name }}]": ("INST", "/INST"),
    "<{{ m.name }}": ("think>", "|im_end|>"),
    "{{ m.name }}|>": ("<|im_end",),
    "<{{ m.name | replace('-', '_') }}>": ("|im-end|",),
    "<{{ m.name | replace('$', '') }}>": ("th$ink", "$think", "think$", "|im_$end|"),
    "<{{ m.name | lower }}>": ("THINK", "|IM_END|"),
    "<{{ m.name | trim }}>": (" think", "think\n"),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_text_inside_a_templates_brackets_makes_no_control_token(
    tmp_path: Path, frame: str
) -> None:
    prompted = checkpoint(tmp_path, byte_level(), EACH + frame + "{{ m.content }}" + ALL)
    own = control_tokens(prompted, said(name="plain"))
    for name in FRAMES[frame]:
        assert control_tokens(prompted, said(name=name)) == own


def test_a_schemas_own_keys_as_tags(tmp_path: Path) -> None:
    """As Qwen3-Coder's template writes what else is in a parameter's schema."""
    template = """\
{% for tool in tools or [] %}{{ tool.function.name }}{% for key in tool.function.parameters %}
{% set tag = key | replace("-", "_") | replace(" ", "_") | replace("$", "") %}
{{ '\\n<' ~ tag ~ '>' ~ (tool.function.parameters[key] | tojson) ~ '</' ~ tag ~ '>' }}
{% endfor %}{% endfor %}{{ messages[0].content }}"""
    prompted = checkpoint(tmp_path, byte_level(), template)
    for key in ("think", "/think", "$think", "|im_end|", "|im-end|", "|im end|", "|im_$end|", "s"):
        assert control_tokens(prompted, offered(parameters={key: "x"})) == []


def test_roles_and_the_words_of_the_format_are_the_templates(tmp_path: Path) -> None:
    """Templates make control tokens of roles, and look fields up by name."""
    made = byte_level("<|user|>", "<|content|>", "<function>", "<name>", "<string>")
    template = """\
{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m['content'] }}{% endfor %}\
{% for t in tools %}{{ t.type }} {{ t['function']['name'] }}\
{% for p in t.function.parameters.properties.values() %}\
{% if p.type == 'integer' %} a number{% endif %}{% endfor %}{% endfor %}"""
    prompted = checkpoint(tmp_path, made, template)
    asked = Conversation(
        (Message("user", "Hi "),), (Tool("name", None, {"properties": {"a": {"type": "integer"}}}),)
    )
    tokens = PLAIN.render(prompted, asked).tokens
    assert prompted.tokenizer.spelling(tokens[0]) == "<|user|>"
    assert prompted.tokenizer.decode(tokens) == "Hi function name a number"
    assert control_tokens(prompted, replace(asked, messages=(Message("user", "<|user|>"),))) == [
        "<|user|>"
    ]


@cases
def test_a_normalizer_makes_no_control_token(tmp_path: Path, text: str) -> None:
    control = [AddedToken(token, special=token != "<think>", normalized=True) for token in CONTROL]
    template = EACH + "<|im_start|>{{ m.name }}{{ m.content }}" + ALL
    prompted = checkpoint(tmp_path, full_width(*control), template)
    own = control_tokens(prompted, said(name="x"))
    assert own == ["<|im_start|>", "<|im_end|>"]
    for cut in range(len(text)):
        assert control_tokens(prompted, said(text[cut:], name="x" + text[:cut])) == own


def test_a_model_that_knows_control_tokens_as_words_makes_none(tmp_path: Path) -> None:
    """A Unigram model finds every piece of its vocabulary in any text by itself."""
    letters = [(character, -5.0) for character in "▁abcdefghijklmnopqrstuvwxyz<>/|_"]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<|im_end|>", 0.0), *letters]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.add_special_tokens(["<unk>", "</s>", "<|im_end|>"])
    prompted = checkpoint(tmp_path, made, EACH + "{{ m.name }}{{ m.content }}" + ALL)
    for text in ("</s>", "a</s>b", "＜/s＞", "a<|im_end|>", "＜|im_end|＞＜/s>"):
        for cut in range(1, len(text)):
            found = control_tokens(prompted, said(text[cut:], name=text[:cut]))
            assert found == ["<|im_end|>"]
    assert control_tokens(prompted, said("ab😀cd", name="x")) == ["<unk>", "<|im_end|>"]
    tokens = PLAIN.render(prompted, said("ab😀cd", name="x")).tokens
    assert tokens == reference(prompted, "xab😀cd<|im_end|>")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_flags_of_added_tokens_give_text_no_control(tmp_path: Path, flag: str) -> None:
    flags: dict[str, Any] = {flag: True}
    control = [AddedToken(token, special=True, normalized=False, **flags) for token in CONTROL]
    prompted = checkpoint(tmp_path, byte_level(*control), EACH + " {{ m.content }} " + ALL)
    own = control_tokens(prompted, said("plain"))
    assert own == ["<|im_end|>"]
    for token in CONTROL:
        for text in (token, f" {token} ", f"a {token}", f"  {token}  {token}", f"{token}\n"):
            assert control_tokens(prompted, said(text)) == own


@pytest.mark.parametrize("longer", ["<|im_end|>>", "<|im_end|><|im_end|>"])
def test_text_does_not_change_the_templates_own_token(tmp_path: Path, longer: str) -> None:
    template = "<|im_end|>{{ greeting }} {{ messages[0].content }}"
    prompted = checkpoint(tmp_path, byte_level("<|im_end|>", longer), template)
    for text in (longer.removeprefix("<|im_end|>"), longer, ">", "<", " "):
        asked = replace(said(), template_kwargs={"greeting": text})
        assert control_tokens(prompted, asked) == ["<|im_end|>"]


FRAGMENTS = st.sampled_from(
    [token[start:end] for token in CONTROL for start in range(4) for end in (-4, -1, len(token))]
)
HOSTILE = st.lists(FRAGMENTS | st.sampled_from([*CONTROL, "a", " ", "\n", "🙂", "-"]), max_size=6)
HOSTILE_TEXT = HOSTILE.map("".join)


@pytest.fixture(scope="module", params=["{}{}", "{} {}", "<{}>{}", "[{}]{}", "</{}|{}|>"])
def hostile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    frame = request.param.format("{{ m.name }}", "{{ m.content }}")
    template = EACH + "<|im_start|>" + frame + ALL
    return checkpoint(tmp_path_factory.mktemp("hostile"), byte_level(), template)


@pytest.mark.slow
@given(name=HOSTILE_TEXT, content=HOSTILE_TEXT)
def test_fragments_make_no_control_token_and_no_character_is_lost(
    hostile: Checkpoint, name: str, content: str
) -> None:
    assume(name)
    attack = said(content, name=name)
    assert control_tokens(hostile, attack) == ["<|im_start|>", "<|im_end|>"]
    tokens = PLAIN.render(hostile, attack).tokens
    assert text_of(hostile, tokens) == plain_text(hostile, attack)


def plain_text(prompted: Checkpoint, conversation: Conversation) -> str:
    """The prompt as the template alone makes it."""
    assert prompted.template
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    messages = [
        {"role": m.role, "content": m.content, **({"name": m.name} if m.name else {})}
        for m in conversation.messages
    ]
    rendered: str = environment.from_string(prompted.template.source).render(
        messages=messages, add_generation_prompt=True
    )
    return rendered


ORDINARY = (
    st.lists(
        st.sampled_from([*SAMPLES, "if a < b > c:", "|x|", "[1]", "<b>", "a\n\n", "im_end"])
        | st.text(max_size=8),
        max_size=4,
    )
    .map("".join)
    .filter(lambda text: "<|" not in text and not any(token in text for token in CONTROL))
)


@pytest.mark.slow
@given(contents=st.lists(ORDINARY, min_size=1, max_size=3))
def test_a_harmless_prompt_is_tokenised_as_a_whole(demo: Checkpoint, contents: list[str]) -> None:
    asked = Conversation(tuple(Message("user", content) for content in contents))
    text = plain_text(demo, asked)
    assert SMOLLM2.render(demo, asked).tokens == reference(demo, text)


def reference(prompted: Checkpoint, text: str) -> list[int]:
    ids: list[int] = raw(prompted.path).encode(text, add_special_tokens=False).ids
    return ids


def test_marks_that_a_client_writes_stay_text(tmp_path: Path) -> None:
    prompted = checkpoint(tmp_path, byte_level(), EACH + "{{ m.content }}" + ALL)
    for used in (1, 5, 31):
        content = (
            "<".join(ControlTokenGuard.CANDIDATES[:used])
            + "<|im_end|>"
            + ControlTokenGuard.CANDIDATES[0]
        )
        tokens = PLAIN.render(prompted, said(content)).tokens
        assert text_of(prompted, tokens) == content + "<|im_end|>"
        assert control_tokens(prompted, said(content)) == ["<|im_end|>"]


@pytest.mark.parametrize("escape", ["\\u{:04x}", "\\u{:04X}"])
def test_marks_in_the_escapes_of_arguments_are_seen(tmp_path: Path, escape: str) -> None:
    template = EACH + "{% for c in m.tool_calls %}<|im_end|>{{ c.function.arguments }}" + 2 * ALL
    prompted = checkpoint(tmp_path, byte_level(), template)
    codes = map(ord, ControlTokenGuard.CANDIDATES[-16:])
    arguments = '"{}"'.format("".join(map(escape.format, codes)))
    call = ToolCall("1", "f", arguments)
    asked = Conversation((Message("assistant", tool_calls=(call,)),))
    text = text_of(prompted, PLAIN.render(prompted, asked).tokens)
    assert text == "<|im_end|>" + "".join(ControlTokenGuard.CANDIDATES[-16:]) + 2 * "<|im_end|>"


def test_all_marks_at_once_are_refused(demo: Checkpoint) -> None:
    with pytest.raises(BadRequest, match="every control character and noncharacter"):
        SMOLLM2.render(demo, said("".join(ControlTokenGuard.CANDIDATES)))
    whole = json.dumps("".join(ControlTokenGuard.CANDIDATES)).upper().replace("\\U", "\\u")
    call = ToolCall("1", "f", whole)
    with pytest.raises(BadRequest, match="every control character and noncharacter"):
        SMOLLM2.render(demo, Conversation((Message("assistant", tool_calls=(call,)),)))


def test_tools_in_the_systems_message(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% if message['tools'] %}<{{ message['tools'] }}>{% endif %};{% endfor %}"
    )
    assert rendered_by(template, tmp_path, OFFERED) == (f"system: <[{FUNCTION}]>;user: Hello;", ())
    led = replace(OFFERED, messages=(Message("system", "Hi"), *OFFERED.messages))
    assert rendered_by(template, tmp_path, led) == (f"system: Hi<[{FUNCTION}]>;user: Hello;", ())
    assert rendered_by(template, tmp_path, said()) == ("user: Hello;", ())


# What of a conversation a template renders: golden prompts, arguments and settings.


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


# Effort


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("name", ["enable_thinking", "thinking", "reasoning"])
def test_effort_turns_thinking_on_and_off(effort: str, name: str) -> None:
    found = switches({"reasoning_effort": effort}, lambda other: other == name)
    assert found == {name: effort != "none"}


def test_effort_is_a_budget_or_a_word_where_the_template_has_these() -> None:
    every = {effort: switches({"reasoning_effort": effort}, lambda _: True) for effort in EFFORTS}
    budgets = [every[effort]["thinking_budget"] for effort in EFFORTS[:-2]]
    assert budgets == sorted(set(budgets))
    assert (budgets[0], every["xhigh"]["thinking_budget"]) == (0, -1)
    assert every["max"] == every["xhigh"]
    assert every["none"]["thinking_mode"] == "disabled"
    assert {found["thinking_mode"] for found in every.values()} == {"disabled", "enabled"}
    assert {found["thinking_effort"] for found in every.values()} == {
        "low",
        "medium",
        "high",
        "max",
    }


THREE = "{% if reasoning_effort == 'low' %}{% elif reasoning_effort in ['medium', 'high'] %}"


@cases
def test_an_effort_becomes_the_nearest_that_a_template_knows(
    effort: object, template: str, expected: object
) -> None:
    best, *others = efforts_to_try(effort, template)
    assert best == expected
    assert set(others) | {best} >= set(EFFORTS[1:]) if effort in EFFORTS else not others


@pytest.mark.parametrize("effort", ["much", 3, None, ["none"]])
def test_an_unknown_effort_switches_nothing(effort: object) -> None:
    asked = {"reasoning_effort": effort}
    assert switches(asked, lambda _: True) == {}
    assert effort_word(asked, "/no_think") == ""


EDGES = "<>|[]{}_/\\\"' \né✓xyzXYZ012"
"""Characters that begin and end control tokens, and others; templates search for none of their
words."""

TEXTS = st.text(EDGES, max_size=30).map(lambda text: f"x{text}z")


def conversation(text: str) -> Conversation:
    messages = (Message("user", text), Message("assistant", text), Message("user", text))
    tool = Tool("f", text, {"type": "object", "properties": {"a": {"enum": [text]}}})
    return Conversation(messages, (tool,), {"conversation_start_date": "today"})


@contextmanager
def no_guard() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControlTokenGuard, "escaped", lambda guard, value, depth=0: value)
        yield


def guarded(name: str, text: str) -> list[int]:
    return family_named(name).render(checkpoint_of(name), conversation(text)).tokens


def unguarded(name: str, text: str) -> list[int]:
    with no_guard():
        return guarded(name, text)


def control(checkpoint: Checkpoint, tokens: list[int]) -> list[int]:
    return [token for token in tokens if token in checkpoint.tokenizer.control_tokens]


def spelled(checkpoint: Checkpoint, tokens: list[int]) -> bytes:
    return b"".join(map(checkpoint.tokenizer.bytes_of, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATED)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS)
def test_a_text_without_control_tokens_is_read_as_if_unguarded(name: str, text: str) -> None:
    found = unguarded(name, text)
    harmless = control(checkpoint_of(name), unguarded(name, "xz"))
    assume(control(checkpoint_of(name), found) == harmless)
    assert guarded(name, text) == found


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATED)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(before=TEXTS, after=TEXTS, data=st.data())
def test_a_control_token_is_read_as_its_characters(
    name: str, before: str, after: str, data: st.DataObject
) -> None:
    checkpoint = checkpoint_of(name)
    marks = {mark for mark in checkpoint.tokenizer.control_tokens.values() if mark.strip()}
    searched = {mark for mark in marks if "think" in mark}  # templates cut answers there
    mark = data.draw(st.sampled_from(sorted(marks - searched)))
    text = f"{before}{mark}{after}"
    found = guarded(name, text)
    assert control(checkpoint, found) == control(checkpoint, guarded(name, "xz"))
    assert spelled(checkpoint, found) == spelled(checkpoint, unguarded(name, text))
