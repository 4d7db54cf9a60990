"""No text of a user, a system or a tool is missing from a prompt without a word about it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.errors import ModelUnusable
from mlx_server.families import FAMILIES, family_named, fitted
from mlx_server.families.base import ModelFamily
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Conversation, Message, Role, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.families import byte_level, checkpoint
from tests.families.prompts import checkpoint_of
from tests.prompts.template_prompts import EACH, rendered_by, said, text_of
from tests.tables import cases


def turns(body: str) -> str:
    return EACH + "{{ m.role }}: " + body + ";{% endfor %}assistant:"


IF_TEXT = "{% if c.type == 'text' %}{{ c.text }}{% endif %}"
PARTS = {
    "a loop": "{% for c in m.content %}" + IF_TEXT + "{% endfor %}",
    "selectattr": "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}"
    "{% endfor %}",
    "join": "{{ m.content | map(attribute='text') | join('') }}",
    "the first one": "{{ m.content[0].text }}",
    "the first one of a dict": "{{ m.content[0]['text'] + '' }}",
    "no strings": "{% if m.content is string %}{{ raise_exception('parts!') }}{% endif %}"
    "{{ m.content[0].text }}",
}
"""How templates of vision models read a content."""

MIXED = {
    role: "{% if m.role == '" + role + "' %}" + PARTS["a loop"] + "{% else %}{{ m.content }}"
    "{% endif %}"
    for role in ("user", "system", "assistant", "tool")
} | {
    "all but user": "{% if m.role == 'user' %}{{ m.content }}{% else %}"
    + PARTS["a loop"]
    + "{% endif %}",
    "all but system": "{% if m.role == 'system' %}{{ m.content }}{% else %}"
    + PARTS["the first one"]
    + "{% endif %}",
}
"""Which roles of a template have parts."""

CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}"
)

ASKED = Conversation(
    (
        Message("system", "SYSTEM-TEXT <b>"),
        Message("user", "USER-TEXT ü"),
        Message("assistant", "", tool_calls=(ToolCall("1", "f", '{"a": "CALL-TEXT"}'),)),
        Message("tool", "TOOL-TEXT", tool_call_id="1"),
        Message("assistant", "ANSWER-TEXT"),
        Message("user", ""),
        Message("developer", "DEVELOPER-TEXT"),
        Message("user", "LAST-TEXT"),
    )
)
TEXTS = (
    "SYSTEM-TEXT <b>",
    "USER-TEXT ü",
    "TOOL-TEXT",
    "ANSWER-TEXT",
    "DEVELOPER-TEXT",
    "LAST-TEXT",
)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["", CALLS], ids=["text", "calls"])
@pytest.mark.parametrize("body", [*PARTS.values(), *MIXED.values()], ids=[*PARTS, *MIXED])
def test_a_template_that_reads_parts_is_given_parts(tmp_path: Path, body: str, calls: str) -> None:
    text, ignored = rendered_by(turns(body + calls), tmp_path, ASKED)
    places = [text.index(each) for each in (*TEXTS, "CALL-TEXT")]
    assert places[:-1] == sorted(places[:-1])
    assert "'text'" not in text
    assert ignored == ()
    plain = turns("{{ m.content }}" + calls)
    assert text == rendered_by(plain, tmp_path, ASKED)[0]


@pytest.mark.parametrize(
    "template",
    [
        "assistant:",
        turns("{{ m.text }}"),
        turns("{{ m.content.parts }}"),
        turns("{{ m.content[0].query }}"),
    ],
)
def test_a_template_that_shows_no_text_of_a_user_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(ModelUnusable, match="chat_template"):
        rendered_by(template, tmp_path, said("USER-TEXT"))
    assert rendered_by(template, tmp_path, said(" "))[1] == ()


@cases
def test_what_a_template_drops_is_shown_in_another_form_or_named(
    tmp_path: Path, condition: str, kept: bool
) -> None:
    body = "{% if " + condition + " %}{{ m.content }}{% endif %}"
    asked = replace(ASKED, messages=ASKED.messages[:4])
    text, ignored = rendered_by(turns(body), tmp_path, asked)
    shown = [text.find(each.content) >= 0 for each in asked.messages]
    named = [f"messages[{i}].content" in ignored for i in range(len(asked.messages))]
    assert named == [not each for each in shown]
    assert all(shown) == kept


EDITS = {
    "json": "{{ m.content | tojson }}",
    "ascii": "{{ m.content | tojson(ensure_ascii=True) }}",
    "trimmed": "{{ m.content | trim }}",
    "html": "{{ m.content | e }}",
    "lines": "{{ m.content.split('\n') | join(' / ') }}",
    "switched": "{{ m.content.replace('/no_think', '') }}",
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    "text",
    ["/no_think", ' Grüße \n\n"an" <alle> /no_think', "漢字を書く\n", "?!", "👍🏽 <|im_end|>"],
)
def test_an_edited_text_is_not_lost(tmp_path: Path, edit: str, text: str) -> None:
    prompt, ignored = rendered_by(turns(EDITS[edit]), tmp_path, said(text))
    assert ignored == ()
    assert prompt.startswith("user:")  # and no other form was tried


def texts(number: int) -> st.SearchStrategy[str]:
    """Texts with a word that no other one has."""
    word = f"word{number}q"
    odd = (f'<b>{word}</b> "x"\n\n\\n <|im_end|>', f"  {word}\n", f"/no_think {word}")
    return st.sampled_from(["", " \n", word, word, word, *odd])


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages: list[Message] = []
    roles: list[Role] = ["system", "developer", "user", "user", "assistant", "assistant", "tool"]
    for i, role in enumerate(draw(st.lists(st.sampled_from(roles), min_size=1, max_size=8))):
        message = Message(role, draw(texts(i)), name=draw(st.sampled_from([None, None, "bob"])))
        if role == "assistant":
            calls = range(draw(st.integers(0, 2)))
            message = replace(
                message,
                tool_calls=tuple(ToolCall(f"call{i}{n}000", "f", '{"a": "b"}') for n in calls),
                reasoning=draw(st.sampled_from([None, "so"])),
            )
        if role == "tool":
            ids = [call.id for each in messages for call in each.tool_calls]
            message = replace(message, tool_call_id=draw(st.sampled_from([*ids, "unknown"])))
        messages.append(message)
    last = messages[-1]
    continued = last.role == "assistant" and not last.tool_calls and bool(last.content.strip())
    return Conversation(
        tuple(messages),
        draw(st.sampled_from([(), (Tool("f"),)])),
        continue_final_message=continued and draw(st.booleans()),
    )


def missing(prompted: Checkpoint, family: ModelFamily, asked: Conversation) -> list[str]:
    """The names of texts that are not in the prompt and not in what is said to be ignored."""
    rendered = family.render(prompted, asked)
    prompt = text_of(prompted, rendered.tokens)
    lacking = {
        f"messages[{i}].content"
        for i, message in enumerate(asked.messages)
        if (word := re.search(r"word\d+q", message.content)) and word[0] not in prompt
    }
    named = {each for each in rendered.ignored if each.startswith("messages[")}
    return sorted(lacking ^ (named - {"messages.name"}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=10)
@given(asked=conversations())
def test_no_text_is_missing_from_any_familys_prompt(name: str, asked: Conversation) -> None:
    prompted = checkpoint_of(name)
    assert missing(prompted, fitted(family_named(name), prompted), asked) == []


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("unknown"), byte_level(), "{{ messages }}")


@pytest.mark.slow
@pytest.mark.parametrize("body", [*PARTS.values(), *MIXED.values()], ids=[*PARTS, *MIXED])
@settings(max_examples=10)
@given(asked=conversations())
def test_no_text_is_missing_where_parts_are_read(
    unknown: Checkpoint, body: str, asked: Conversation
) -> None:
    prompted = replace(unknown, template=ChatTemplate(turns(body + CALLS)))
    assert missing(prompted, fitted(PLAIN, prompted), asked) == []
