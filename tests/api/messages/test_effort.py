"""Thinking, and the effort of an answer."""

import pytest

from mlx_server.api.fields import SUMMARIZE
from mlx_server.messages import Conversation, Message
from tests.api.messages.bodies import (
    HI,
    TOOL,
    assistant,
    conversation,
    parsed,
    refused,
    result,
    text,
    use,
    user,
)
from tests.api.wire import Json

# Thinking, effort and format


LOW: Json = {"role": "system", "content": [], "output_config": {"effort": "low"}}


MAX: Json = {"role": "system", "output_config": {"effort": "max"}}


RESULT = (assistant(use("1")), user(result("1")))


@pytest.mark.parametrize(
    ("given", "effort"),
    [
        ([HI], "high"),
        ([HI, LOW], "low"),
        ([LOW, HI], "low"),
        ([HI, LOW, MAX], "max"),
        ([HI, LOW, assistant(text("a")), HI], "low"),
        ([HI, LOW, assistant(text("a")), MAX, HI], "max"),
        # from the next input on, which results are not
        ([HI, *RESULT, LOW], "high"),
        ([HI, LOW, *RESULT, MAX], "low"),
        ([HI, *RESULT, LOW, assistant(text("a")), HI], "low"),
    ],
)
def test_the_effort_of_a_system_message(given: list[Json], effort: str) -> None:
    found = conversation(messages=given, output_config={"effort": "high"})
    assert found.template_kwargs == {"reasoning_effort": effort}


@pytest.mark.parametrize(("given", "effort"), [([HI], "none"), ([HI, *RESULT], "medium")])
def test_thinking_between_tools(given: list[Json], effort: str) -> None:
    found = conversation(messages=given, thinking={"type": "between_tools"})
    assert found.template_kwargs == {"reasoning_effort": effort}


def test_a_summary_is_asked_for() -> None:
    asked = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    found = parsed(**asked, compaction={"type": "summarize", "instructions": " "}).request
    (prompt,) = found.prompts
    assert isinstance(prompt, Conversation)
    assert (prompt.tools, found.tool_choice) == ((), "auto")
    assert prompt.messages == (Message("user", "hi"), Message("user", SUMMARIZE))
    own = conversation(compaction={"type": "summarize", "instructions": "Briefly."})
    assert own.messages[-1] == Message("user", "Briefly.")
    assert (
        refused(compaction={"type": "summarize"}, context_management={"edits": []}).param
        == "compaction"
    )


@pytest.mark.parametrize(
    ("asked", "kwargs", "budget"),
    [
        ({}, {}, None),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}, None),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": "medium"}, None),
        (
            {"thinking": {"type": "adaptive", "display": "updates"}},
            {"reasoning_effort": "medium"},
            None,
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"reasoning_effort": "medium", "thinking_budget": 1024},
            1024,
        ),
        (
            {
                "thinking": {"type": "enabled", "budget_tokens": 7, "display": "summarized"},
                "output_config": {"effort": "low"},
            },
            {"reasoning_effort": "low", "thinking_budget": 7},
            7,
        ),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}, None),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}, None),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
            {"reasoning_effort": "xhigh"},
            None,
        ),
    ],
)
def test_thinking(asked: Json, kwargs: Json, budget: int | None) -> None:
    found = parsed(**asked)
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.template_kwargs == kwargs
    assert found.request.thinking_budget == budget
    has_effort = "effort" in asked.get("output_config", {})
    assert found.request.implied == (frozenset() if has_effort else {"reasoning_effort"})
    assert found.ignored == ()


def test_an_effort_without_thinking_is_listed() -> None:
    found = parsed(thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert found.ignored == ("output_config.effort",)


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "enabled"},
        {"type": "adaptive", "budget_tokens": 5},
        {"type": "disabled", "budget_tokens": 5},
    ],
)
def test_a_budget_is_of_enabled_thinking(thinking: Json) -> None:
    assert refused(thinking=thinking).param == "thinking.budget_tokens"
