"""Finds how an upstream model's text is parsed, by the family that models.yaml names."""

from mlx_server.families import AS_TEXT, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.upstream.limited_thoughts import ThoughtTags


def text_family(name: str | None) -> ModelFamily:
    """The family that parses an upstream's text, which comes without token ids; by default
    `plain`."""
    return family_named(AS_TEXT.get(name or "", name or "plain"))


def thought_tags(name: str | None) -> ThoughtTags | None:
    """The tags around the family's reasoning; None if it has none that a message's text may
    have."""
    opens, closes = family_named(name or "plain").thinking_delimiters()
    return ThoughtTags(opens[0], closes[0]) if opens and closes and name not in AS_TEXT else None


def opening_of_reasoning(name: str | None) -> str:
    """The delimiter that opens reasoning for the family's parser; "" if it has none."""
    opens, _ = family_named(name or "plain").thinking_delimiters()
    return opens[0] if opens else ""
