"""Text is never control: in every family, whatever a client writes and wherever it can write.

tests/prompts/test_template_prompt.py tests what a hostile template could do with a client's text.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.chat_completions.input import to_request as of_chat
from mlx_server.api.responses.input import input_items
from mlx_server.api.responses.input import to_request as of_responses
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.families import FAMILIES, family_named
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from tests.families import byte_fallback, byte_level, checkpoint, full_width
from tests.families.prompts import checkpoint_of, template_of

NAMES = [family.name for family in FAMILIES]
TEMPLATED = [name for name in NAMES if template_of(name).is_file()]

WITH_MARKS = {"gpt_oss", *TEMPLATED} - {"plain", "granite_code"}
"""Whose prompts have control tokens of their own."""

USER = Message("user", "Hello")
WIDE = str.maketrans({chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)})


def said(*messages: Message, tools: tuple[Tool, ...] = (), **kwargs: Any) -> Conversation:
    return Conversation(messages, tools, {"conversation_start_date": "today", **kwargs})


def called(id: str = "1", name: str = "f", arguments: str = "{}", result: str = "so") -> Any:
    call = ToolCall(id, name, arguments)
    asks = Message("assistant", tool_calls=(call,))
    return said(USER, asks, Message("tool", result, tool_call_id=id), tools=(Tool("f"),))


def offered(name: str = "f", description: str = "d", /, **parameter: Any) -> Conversation:
    schema = {"type": "object", "properties": {"a": {"type": "string", **parameter}}}
    return said(USER, tools=(Tool(name, description, schema),))


FIELDS: Mapping[str, Callable[[str], Conversation]] = {
    "content": lambda text: said(Message("user", text)),
    "system": lambda text: said(Message("system", text), USER),
    "developer": lambda text: said(Message("developer", text), USER),
    "system later": lambda text: said(USER, Message("system", text), USER),
    "name": lambda text: said(Message("user", "Hello", name=text)),
    "answer": lambda text: said(USER, Message("assistant", text), USER),
    "reasoning": lambda text: said(USER, Message("assistant", "Hi", reasoning=text), USER),
    "reasoning in tags": lambda text: said(
        USER, Message("assistant", f"<think>{text}</think>Hi"), USER
    ),
    "beside a call": lambda text: said(
        USER, Message("assistant", text, tool_calls=(ToolCall("1", "f", "{}"),))
    ),
    "call id": lambda text: called(id=text),
    "call name": lambda text: called(name=text),
    "argument": lambda text: called(arguments=json.dumps({"a": [text, {"b": text}]})),
    "argument's name": lambda text: called(arguments=json.dumps({text: {text: 1}})),
    "escaped argument": lambda text: called(arguments=f'{{"a": "{escaped(text)}"}}'),
    "arguments that are not JSON": lambda text: called(arguments=text),
    "arguments that are a text": lambda text: called(arguments=json.dumps(text)),
    "tool result": lambda text: called(result=text),
    "JSON as a tool result": lambda text: called(result=json.dumps({text: [text]})),
    "result of no call": lambda text: said(USER, Message("tool", text, tool_call_id=text)),
    "tool name": lambda text: offered(text),
    "tool description": lambda text: offered("f", text),
    "schema text": lambda text: offered(description=text, enum=[text], default=text, title=text),
    "schema key": lambda text: offered(**{text: {text: [text]}}),
    "schema type": lambda text: offered(type=text),
    "property": lambda text: said(
        USER, tools=(Tool("f", "d", {"properties": {text: {}}, "required": [text]}),)
    ),
    "response format": lambda text: replace(
        said(USER), response_format={"name": "x", "description": text, "schema": {"a": [1]}}
    ),
    "response format's schema": lambda text: replace(
        said(USER), response_format={"name": "x", "schema": {text: [1]}}
    ),
    "template's kwargs": lambda text: said(
        USER, greeting=text, date_string=text, custom_instructions=text, model_identity=text
    ),
    "chat parts": lambda text: chat(messages=[{"role": "user", "content": parts("text", text)}]),
    "responses items": lambda text: responses(
        instructions=text,
        input=[
            {"role": "user", "content": parts("input_text", text)},
            {"type": "reasoning", "summary": [], "content": parts("reasoning_text", text)},
            {"type": "message", "role": "assistant", "content": parts("output_text", text)},
            {"type": "function_call", "call_id": text, "name": "f", "arguments": text},
            {"type": "function_call_output", "call_id": text, "output": text},
            {"role": "user", "content": text},
        ],
    ),
}


WITH_ALL_MARKS = ("content", "argument", "tool result", "schema key")
"""The others have the family's own, and those that its template names: it may act on them. No other
is more than a text there."""


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


def parts(kind: str, text: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text}, {"type": kind, "text": text}]


def chat(**body: Any) -> Conversation:
    return _only(of_chat(ChatBody.model_validate({"model": "m", **body})).prompts)


def responses(**asked: Any) -> Conversation:
    body = ResponsesBody.model_validate({"model": "m", **asked})
    found = of_responses(body, input_items(body, lambda id: {}), opened=lambda text: None)
    return _only(found.request.prompts)


def _only(prompts: Any) -> Conversation:
    (prompt,) = prompts
    assert isinstance(prompt, Conversation)
    kwargs = {**prompt.template_kwargs, "conversation_start_date": "today"}
    return replace(prompt, template_kwargs=kwargs)


@lru_cache
def every_mark() -> tuple[str, ...]:
    """Of all families: in each of them, some are control tokens and the others text."""
    known = (checkpoint_of(name).tokenizer.control_tokens.values() for name in NAMES)
    return tuple(sorted({mark for marks in known for mark in marks if mark.isprintable()}))


def control(name: str, prompted: Checkpoint, conversation: Conversation) -> list[int]:
    tokens = family_named(name).render(prompted, conversation).tokens
    return [token for token in tokens if token in prompted.tokenizer.control_tokens]


def twin(text: str) -> str:
    """As long, with nothing in it that means anything."""
    return "".join("x" if not character.isspace() else character for character in text)


def own_marks(name: str) -> list[str]:
    """A few entries stand for a thousand of a kind."""
    marks = [mark for mark in checkpoint_of(name).tokenizer.control_tokens.values() if mark.strip()]
    return marks if len(marks) < 100 else [*marks[:30], *marks[-3:]]


@pytest.mark.parametrize("name", NAMES)
def test_no_mark_of_any_family_is_control_in_any_field(name: str) -> None:
    prompted = checkpoint_of(name)
    own, template = own_marks(name), template_of(name)
    named = template.read_text("utf-8") if template.is_file() else ""
    for field, filled in FIELDS.items():
        others = [mark for mark in every_mark() if mark in named or field in WITH_ALL_MARKS]
        text = " ".join([*dict.fromkeys([*own, *others]), *(f"a{mark}b" for mark in own)])
        found = control(name, prompted, filled(text))
        assert found == control(name, prompted, filled(twin(text))), field
        assert found or name not in WITH_MARKS, field


@pytest.mark.parametrize("name", NAMES)
def test_a_mark_cut_over_two_fields_or_messages_is_none(name: str) -> None:
    prompted = checkpoint_of(name)
    for cut in (1, -1):
        halves = [(mark[:cut], mark[cut:]) for mark in own_marks(name) if len(mark) > 2]
        for spread in SPREAD:
            harmless = [(twin(a), twin(b)) for a, b in halves]
            assert control(name, prompted, spread(halves)) == control(
                name, prompted, spread(harmless)
            )


Halves = list[tuple[str, str]]


def over_messages(halves: Halves) -> Conversation:
    turns = (turn for a, b in halves for turn in (Message("user", a), Message("assistant", b)))
    return said(*turns, USER)


def over_results(halves: Halves) -> Conversation:
    calls = [ToolCall(f"call{n:05}", a, json.dumps({a: b})) for n, (a, b) in enumerate(halves)]
    results = [Message("tool", call.name, tool_call_id=call.id) for call in calls]
    return said(USER, Message("assistant", tool_calls=tuple(calls)), *results, tools=(Tool("f"),))


def over_fields(halves: Halves) -> Conversation:
    tools = tuple(
        Tool(a, b, {"properties": {a: {"type": "string", "description": b, "enum": [a, b]}}})
        for a, b in halves
    )
    turns = (
        turn
        for a, b in halves
        for turn in (Message("user", b, name=a), Message("assistant", b, reasoning=a))
    )
    return said(*turns, USER, tools=tools)


SPREAD = (over_messages, over_results, over_fields)


def lookalikes(mark: str) -> Iterator[str]:
    yield mark.translate(WIDE)
    yield mark[0].translate(WIDE) + mark[1:]
    yield mark[:-1] + mark[-1].translate(WIDE)
    yield mark.upper()


@pytest.mark.parametrize("name", TEMPLATED)
def test_what_a_normalizer_makes_of_lookalikes_is_none(tmp_path: Path, name: str) -> None:
    marks = [mark for mark in own_marks(name) if mark.isascii()]
    made = full_width(*(AddedToken(mark.lower(), special=True, normalized=True) for mark in marks))
    prompted = checkpoint(tmp_path, made, template_of(name).read_text("utf-8"))
    text = " ".join(like for mark in marks for like in lookalikes(mark))
    assert made.encode(text).ids != made.encode(twin(text)).ids
    for field in ("content", "system", "argument", "tool result", "schema text", "schema key"):
        attack, harmless = (control(name, prompted, FIELDS[field](t)) for t in (text, twin(text)))
        assert attack == harmless, field


MAKERS: Mapping[str, Callable[..., tokenizers.Tokenizer]] = {
    "bytes": byte_level,
    "pieces": byte_fallback,
    "normalized": full_width,
}
SINGLE = ("☉", "→", "∥", "\n", "ḗ", "☃")
"""None is a letter of these vocabularies, which would stay text."""


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("normalized", [False, True])
def test_a_control_token_of_one_character_is_the_templates_alone(
    tmp_path: Path, maker: str, normalized: bool
) -> None:
    added = [AddedToken(mark, special=True, normalized=normalized) for mark in SINGLE]
    template = "{% for m in messages %}☉{{ m.role }}\n{{ m.content }}→{% endfor %}"
    prompted = checkpoint(tmp_path, MAKERS[maker](*added), template)
    assert len(prompted.tokenizer.control_tokens) >= len(SINGLE)
    own = control("plain", prompted, said(Message("user", "plain")))
    assert [prompted.tokenizer.control_tokens[id] for id in own] == ["☉", "\n", "→"]
    for text in (*SINGLE, "a☉b", "☉☉", "→∥\n∥☉", "￫", "e\u0304\u0301", "".join(SINGLE)):
        assert control("plain", prompted, said(Message("user", text))) == own
