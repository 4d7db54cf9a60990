"""Where the prompts of the next requests branch off is known beforehand, in every family."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import pytest

from mlx_server.families import family_named, fitted
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.prompts.branches import Branches
from tests.families.prompts import GoldenPrompt, checkpoint_of, conversation_named, golden_prompts

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
