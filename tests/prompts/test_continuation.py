"""Prompts that end within the last message, for families with chat templates and for Harmony, and
the beginning of a conversation's next prompt, which is known before its message.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import BadRequest
from mlx_server.families import FAMILIES, family_named, fitted
from mlx_server.families.base import ModelFamily
from mlx_server.families.harmony import GPT_OSS
from mlx_server.families.json_families import PLAIN
from mlx_server.messages import Conversation, Message, Phase, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.prompts.branches import Branches, next_beginning
from mlx_server.prompts.continuation import check_continued, with_open_reasoning
from mlx_server.prompts.control_token_guard import ControlTokenGuard
from tests.families import CONTROL, byte_level, checkpoint
from tests.families.prompts import (
    GoldenPrompt,
    checkpoint_of,
    conversation_named,
    golden_prompts,
    template_of,
)
from tests.tables import cases

LOST = 4
"""Tokens that a branch may lie before the place where the prompts really differ."""

Change = Callable[[Conversation], Conversation | None]


def another_chat(asked: Conversation) -> Conversation | None:
    lead = [m for m in asked.messages if m.role in ("system", "developer")]
    if list(asked.messages[: len(lead)]) != lead:
        return None
    return replace(asked, messages=(*lead, Message("user", "Where do tulips come from?")))


def edited_question(asked: Conversation) -> Conversation | None:
    places = [i for i, message in enumerate(asked.messages) if message.role == "user"]
    before = asked.messages[: places[-1]] if places else ()
    return replace(asked, messages=(*before, Message("user", "No, the other one.")))


def summary_instead_of_an_answer(asked: Conversation) -> Conversation:
    return replace(asked, messages=(*asked.messages, Message("user", "Sum it all up.")))


def another_system_prompt(asked: Conversation) -> Conversation | None:
    if not asked.messages or asked.messages[0].role != "system":
        return None
    own = Message("system", "Your directory is /tmp.")
    return replace(asked, messages=(own, Message("user", "Where do tulips come from?")))


def next_turn(asked: Conversation) -> Conversation:
    answer = Message("assistant", "It rains there.", reasoning="Look outside.")
    more = (answer, Message("user", "And tomorrow?"))
    return replace(asked, messages=(*asked.messages, *more))


def next_round(asked: Conversation) -> Conversation | None:
    if not asked.tools:
        return None
    call = ToolCall("call_12345678", asked.tools[-1].name, '{"city": "Lima"}')
    result = Message("tool", "rain", tool_call_id=call.id, name=call.name)
    more = (Message("assistant", tool_calls=(call,)), result)
    return replace(asked, messages=(*asked.messages, *more))


@lru_cache(maxsize=1)
def original(golden: GoldenPrompt) -> tuple[list[int], Branches]:
    """The changes of a prompt come one after the other."""
    rendered = golden.rendered()
    return rendered.tokens, rendered.branches()


def tokens_of(family: str, conversation: Conversation) -> list[int]:
    checkpoint = checkpoint_of(family)
    return fitted(family_named(family), checkpoint).render(checkpoint, conversation).tokens


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def a_longer_list_of_tools(asked: Conversation) -> Conversation | None:
    """Many templates begin with the tools, and after a longer list all else is new."""
    if not asked.tools:
        return None
    more = Tool("look_up", "Looks a word up.", {"type": "object", "properties": {}})
    return replace(asked, tools=(*asked.tools, more))


CHANGES = [
    *(another_chat, edited_question, another_system_prompt, a_longer_list_of_tools),
    *(summary_instead_of_an_answer, next_turn, next_round),
]


def one_change_of_each() -> Iterator[Any]:
    """In turn, so that each family has several and each change has many families."""
    turn = count()
    for golden in [*golden_prompts()][::3]:
        asked = conversation_named(golden.conversation)
        possible = [change for change in CHANGES if change(asked) is not None]
        if possible and "refused" not in golden.conversation:
            change = possible[next(turn) % len(possible)]
            yield pytest.param(golden, change, id=f"{golden}-{change.__name__}")


@pytest.mark.slow
@pytest.mark.parametrize(("golden", "change"), [*one_change_of_each()])
def test_the_next_request_branches_off_at_a_known_place(
    golden: GoldenPrompt, change: Change
) -> None:
    asked = conversation_named(golden.conversation)
    changed = change(asked)
    assert changed is not None
    tokens, branches = original(golden)
    same = common_tokens(tokens, tokens_of(golden.family, changed))
    reached = [place for place in branches.places if place <= same]
    assert same - max(reached, default=0) <= LOST
    assert sorted(set(branches.places)) == list(branches.places)
    assert all(0 < place <= len(tokens) for place in branches.places)
    if change in (next_turn, next_round):
        assert branches.continued_from <= same
    if change is another_chat:
        assert 0 <= same - branches.shared <= LOST


USER = Message("user", "Where is it?")
SAY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
)
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
REFUSING = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('') }}{% endif %}"
ANSWERS = ("It is in", "It is in ", "It is\n\n", 'a <b> "c" {d} \\e', "", " It")
PAIRS = (("<think>", "</think>"),)


def begun(text: str = "", reasoning: str | None = None, phase: Phase | None = None) -> Conversation:
    messages = (USER, Message("assistant", text, reasoning=reasoning, phase=phase))
    return Conversation(messages, continue_final_message=True)


def text_of(prompted: Checkpoint, tokens: list[int]) -> str:
    return b"".join(map(prompted.tokenizer.bytes_of, tokens)).decode()


def shown(family: ModelFamily, prompted: Checkpoint, asked: Conversation) -> str:
    return text_of(prompted, family.render(prompted, asked).tokens)


NAMES = [family.name for family in FAMILIES if template_of(family.name).is_file()]


def prompted_family(name: str) -> tuple[ModelFamily, Checkpoint]:
    prompted = checkpoint_of(name)
    return fitted(family_named(name), prompted), prompted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "answer"), [*zip(NAMES * 2, cycle(ANSWERS))])
def test_the_prompt_ends_with_the_text(name: str, answer: str) -> None:
    family, prompted = prompted_family(name)
    text = shown(family, prompted, begun(answer))
    # some templates trim what is in front
    assert text.endswith(answer.lstrip())
    assert not any(mark in text for mark in ControlTokenGuard.CANDIDATES)
    closed = shown(family, prompted, replace(begun(answer), continue_final_message=False))
    if answer.strip() and text.strip() in closed:
        assert len(text) < len(closed)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_beginning_of_the_prompt_with_the_whole_message(name: str) -> None:
    family, prompted = prompted_family(name)
    whole = replace(begun("It is in Rome."), continue_final_message=False)
    closed = shown(family, prompted, whole)
    assert closed.startswith(shown(family, prompted, begun("It is in")))


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_continued_inside_of_its_delimiters(name: str) -> None:
    family, prompted = prompted_family(name)
    if not family.reasons(prompted):
        return
    asked = begun(reasoning="They ask where")
    text = shown(family, prompted, asked)
    assert text.endswith("They ask where")
    opening = family.open_end(prompted, asked.messages[-1])
    before = text.removesuffix("They ask where").rstrip()
    assert any(before.endswith(each.strip()) for each, _ in family.reasoning_pairs(prompted))
    assert family.layout_with().inside(opening)


@pytest.mark.parametrize("refuse", [REFUSING, ""], ids=["refused", "dropped"])
@pytest.mark.parametrize(
    ("asked", "end"),
    [
        (begun("It is"), "assistant\n<think>\n\n</think>\n\nIt is"),
        (begun("It is", "Hm."), "assistant\n<think>\nHm.\n</think>\n\nIt is"),
        (begun(reasoning="Hm"), "assistant\n<think>\nHm"),
    ],
    ids=["text", "text and reasoning", "reasoning"],
)
def test_a_template_without_a_last_message_of_the_assistant(
    tmp_path: Path, refuse: str, asked: Conversation, end: str
) -> None:
    """The text follows the generation prompt, and closes the reasoning that this one opens."""
    kept = "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>{% endif %}"
    each = "{% for m in messages %}" + kept + "{% endfor %}"
    prompted = checkpoint(tmp_path, byte_level(), refuse + each + OPEN)
    text = shown(PLAIN, prompted, asked)
    assert text == "<|im_start|>user\nWhere is it?<|im_end|><|im_start|>" + end
    tokens = PLAIN.render(prompted, asked).tokens
    known = prompted.tokenizer.control_tokens
    spelled = [known[token] for token in tokens if token in known]
    assert spelled.count("<think>") == 1
    assert spelled.count("</think>") == bool(asked.messages[-1].content)


@pytest.mark.parametrize("source", [SAY, REFUSING + SAY + OPEN], ids=["rendered", "refused"])
def test_no_special_token_comes_from_the_text(tmp_path: Path, source: str) -> None:
    prompted = checkpoint(tmp_path, byte_level(), source)

    def special(text: str) -> list[int]:
        tokens = PLAIN.render(prompted, begun(text, text)).tokens
        return [token for token in tokens if token in prompted.tokenizer.control_tokens]

    for token in CONTROL:
        for text in (token, f"a{token}b", token * 2, token[:-1], f"{token} "):
            assert special(text) == special("plain")


def test_a_text_with_all_but_two_unused_characters_is_continued(tmp_path: Path) -> None:
    prompted = checkpoint(tmp_path, byte_level(), SAY)
    used = "".join(ControlTokenGuard.CANDIDATES)
    assert shown(PLAIN, prompted, begun(f"a{used[:-2]}")).endswith(f"a{used[:-2]}")
    with pytest.raises(BadRequest, match="every control character"):
        PLAIN.render(prompted, begun(f"a{used[:-1]}"))


@pytest.mark.parametrize(
    ("messages", "param", "reasons"),
    [
        ((), "messages[0].role", True),
        ((USER,), "messages[0].role", True),
        ((USER, Message("tool", "x", tool_call_id="1")), "messages[1].role", True),
        (
            (USER, Message("assistant", "x", tool_calls=(ToolCall("1", "f", "{}"),))),
            "messages[1].tool_calls",
            True,
        ),
        ((USER, Message("assistant", reasoning="x")), "messages[1].reasoning_content", False),
    ],
)
def test_messages_that_can_not_be_continued(
    messages: tuple[Message, ...], param: str, reasons: bool
) -> None:
    with pytest.raises(BadRequest) as caught:
        check_continued(Conversation(messages, continue_final_message=True), reasons=reasons)
    assert caught.value.param == param
    check_continued(Conversation(messages), reasons=reasons)


@cases
def test_text_that_opens_reasoning_is_reasoning(
    text: str, content: str, reasoning: str | None
) -> None:
    found = with_open_reasoning(begun(text), PAIRS).messages[-1]
    assert (found.content, found.reasoning) == (content, reasoning)
    assert with_open_reasoning(begun(text), ()) == begun(text)


def test_an_answer_is_appended_to_the_message_that_it_continues() -> None:
    answer = Message("assistant", " Rome", reasoning="so", tool_calls=(ToolCall("1", "f", "{}"),))
    continued = begun("It is in", "Hm, ").with_answer(answer)
    assert continued.messages == (
        USER,
        replace(answer, content="It is in Rome", reasoning="Hm, so"),
    )
    assert continued.continued is None
    new = Conversation((USER,)).with_answer(answer)
    assert new.messages == (USER, answer)


# Harmony

HEADERS = {
    "final": (begun("It is in "), "<|channel|>final<|message|>It is in "),
    "analysis": (begun(reasoning="Hm"), "<|channel|>analysis<|message|>Hm"),
    "both": (
        begun("It", "Hm"),
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>It",
    ),
    "commentary": (begun("I look", phase="commentary"), "<|channel|>commentary<|message|>I look"),
    "nothing": (begun(), "<|channel|>final<|message|>"),
    "control tokens": (begun("<|end|>"), "<|channel|>final<|message|><|end|>"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADERS)
def test_a_harmony_message_stays_open(name: str) -> None:
    asked, end = HEADERS[name]
    prompted = checkpoint_of("gpt_oss")
    before = replace(asked, messages=asked.messages[:-1], continue_final_message=False)
    first = GPT_OSS.render(prompted, before).tokens
    tokens = GPT_OSS.render(prompted, asked).tokens
    assert tokens[: len(first)] == first
    assert prompted.tokenizer.raw(tokens[len(first) :]) == end
    ends = [prompted.tokenizer.id_of("<|end|>"), prompted.tokenizer.id_of("<|return|>")]
    assert [token in ends for token in tokens[len(first) :]].count(True) == (name == "both")


ANSWER = Message("assistant", "It rains there.", reasoning="Look outside.")
QUESTIONS = ["And tomorrow?", "\n\nWhat now?", "<system-reminder>\nBe brief.", "1", "- a"]


def continued(asked: Conversation, answer: Message, text: str) -> Conversation:
    results = [
        Message("tool", text, tool_call_id=call.id, name=call.name) for call in answer.tool_calls
    ]
    following = results or [Message("user", text)]
    return replace(asked, messages=(*asked.messages, answer, *following))


def check(golden: GoldenPrompt, asked: Conversation, sent: Message, answer: Message) -> None:
    """sent: the answer as the client sends it back."""
    begins = next_beginning(asked, answer, lambda each: tokens_of(golden.family, each))
    prompts = [tokens_of(golden.family, continued(asked, sent, text)) for text in QUESTIONS]
    for prompt in prompts:
        assert prompt[: len(begins)] == begins
    shared = min(common_tokens(prompts[0], prompt) for prompt in prompts[1:])
    assert shared - len(begins) <= LOST


WITH_A_NEXT_TURN = [
    golden
    for golden in golden_prompts()
    if "refused" not in golden.conversation
    and not conversation_named(golden.conversation).continued
]


@pytest.mark.slow
@pytest.mark.parametrize("golden", WITH_A_NEXT_TURN, ids=str)
def test_it_ends_where_the_next_message_or_the_results_of_calls_begin(golden: GoldenPrompt) -> None:
    asked = conversation_named(golden.conversation)
    thinks = any(m.role == "assistant" and m.reasoning for m in asked.messages)
    check(golden, asked, ANSWER if thinks else replace(ANSWER, reasoning=None), ANSWER)
    if asked.tools:
        call = ToolCall("call_12345678", asked.tools[-1].name, '{"city": "Lima"}')
        answer = Message("assistant", tool_calls=(call,))
        check(golden, asked, answer, answer)


def words(conversation: Conversation) -> list[int]:
    """A template that renders everything, thoughts included."""
    texts = (f"{m.role}:{m.reasoning or ''}:{m.content}." for m in conversation.messages)
    return list("".join(texts).encode())


@pytest.mark.parametrize("before", [None, "Hm."])
def test_thoughts_are_sent_back_if_earlier_ones_were(before: str | None) -> None:
    asked = Conversation(
        (Message("user", "a"), Message("assistant", "b", reasoning=before), Message("user", "c"))
    )
    answer = Message("assistant", "d", reasoning="Yes.")
    begins = bytes(next_beginning(asked, answer, words)).decode()
    assert begins.endswith(f"assistant:{'Yes.' if before else ''}:d.user::")
