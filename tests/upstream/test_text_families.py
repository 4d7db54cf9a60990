"""How an upstream model's text is parsed, and between which tags it thinks."""

import pytest

from mlx_server.errors import SettingsError
from mlx_server.families import AS_TEXT, FAMILIES
from mlx_server.upstream.text_families import (
    ThoughtTags,
    opening_of_reasoning,
    text_family,
    thought_tags,
)

THINK = ThoughtTags("<think>", "</think>")


@pytest.mark.parametrize(
    ("name", "family", "tags", "opening"),
    [
        (None, "plain", THINK, "<think>"),
        ("", "plain", THINK, "<think>"),
        ("qwen3", "qwen3", THINK, "<think>"),
        ("mistral", "mistral", ThoughtTags("[THINK]", "[/THINK]"), "[THINK]"),
        ("functiongemma", "functiongemma", None, ""),
        ("gpt_oss", "harmony_text", None, "<|channel|>analysis<|message|>"),
        ("harmony_text", "harmony_text", None, ""),
    ],
)
def test_a_family_by_its_name(
    name: str | None, family: str, tags: ThoughtTags | None, opening: str
) -> None:
    assert text_family(name).name == family
    assert thought_tags(name) == tags
    assert opening_of_reasoning(name) == opening


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_no_family_is_parsed_by_token_ids_and_tags_come_in_pairs(name: str) -> None:
    assert text_family(name).name not in AS_TEXT
    tags = thought_tags(name)
    assert tags is None or (tags.opening and tags.closing and tags.opening != tags.closing)


def test_a_family_that_there_is_not() -> None:
    for find in (text_family, thought_tags, opening_of_reasoning):
        with pytest.raises(SettingsError):
            find("gpt")
