"""An effort becomes what a template has for it: a switch, a budget or a word."""

import pytest

from mlx_server.prompts.template_capabilities import EFFORTS, effort_word, efforts_to_try, switches

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


@pytest.mark.parametrize(
    ("effort", "template", "expected"),
    [
        ("max", THREE, "high"),
        ("xhigh", THREE, "high"),
        ("medium", THREE, "medium"),
        ("minimal", THREE, "low"),
        ("none", THREE, "none"),
        ("max", "{% if reasoning_effort == 'none' %}", "max"),
        ("max", '{% if reasoning_effort != "high" %}', "high"),
        ("high", '{% if reasoning_effort in ["none", "minimal", "low"] %}', "high"),  # they end it
        ("low", "{% if reasoning_effort == 'high' %}", "low"),  # it may have a branch for others
        ("low", "{% set reasoning_effort = 'medium' %}{{ reasoning_effort }}", "low"),
        ("much", THREE, "much"),
        (["low"], THREE, ["low"]),
        (None, THREE, None),
    ],
)
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
