"""Rows get the grammar of what the client requires, and a budget for their reasoning."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlx_server.generation.constraints import is_format_required
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import JsonFormat
from tests.generation.scripted import ASKED, rows_of
from tests.tables import cases

HI = Conversation((Message("user", "Hi"),))
CHAT = replace(ASKED, prompts=(HI,))
LIST = JsonFormat({"type": "array", "items": {"type": "integer"}})


def test_rows_of_one_prompt_share_their_grammar(spec: ModelSpec) -> None:
    first, second = rows_of(spec, replace(CHAT, format=LIST, n=2))
    assert first.grammar
    assert second.grammar is first.grammar
    assert [row.grammar for row in rows_of(spec, CHAT)] == [None]


@pytest.mark.parametrize("prompt", [HI, "Hi"])
def test_nothing_is_constrained_unless_it_is_asked_for(spec: ModelSpec, prompt: Any) -> None:
    [row] = rows_of(spec, replace(ASKED, prompts=(prompt,), tool_choice="auto"))
    assert (row.grammar, row.thinking) == (None, None)


@pytest.mark.parametrize(
    ("asked", "required"),
    [
        ({}, False),
        ({"format": LIST}, True),
        ({"tool_choice": "required"}, True),
        ({"prompts": (replace(HI, tools=(Tool("f"),)),)}, False),
        ({"prompts": (HI, replace(HI, tools=(Tool("g"), Tool("f", strict=True))))}, True),
    ],
)
def test_what_a_client_requires(asked: dict[str, Any], required: bool) -> None:
    assert is_format_required(replace(CHAT, **asked)) == required


@cases
def test_a_budget_is_the_requests_or_none_at_all(
    replayed: Callable[..., ModelSpec],
    owners: dict[str, Any],
    clients: dict[str, Any],
    asked: int | None,
    budget: int | None,
) -> None:
    spec = replace(replayed({"output": "x"}, family="qwen3"), template_kwargs=owners)
    chat = replace(HI, template_kwargs=clients)
    [row] = rows_of(spec, replace(CHAT, prompts=(chat,), thinking_budget=asked))
    if budget is None:
        assert row.thinking is None
    else:
        assert row.thinking
        assert row.thinking.budget is not None
        spent = budget - row.thinking.budget
        assert 0 <= spent <= max(0, budget - 1), "what leads out of reasoning counts"
