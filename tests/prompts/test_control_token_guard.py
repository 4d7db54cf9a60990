"""The guard's marks leave no trace in what the model reads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mlx_server.families import FAMILIES, family_named
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.prompts.control_token_guard import ControlTokenGuard
from tests.families.prompts import checkpoint_of, template_of

pytestmark = pytest.mark.slow

TEMPLATED = [family.name for family in FAMILIES if template_of(family.name).is_file()]

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


@pytest.mark.parametrize("name", TEMPLATED)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS)
def test_a_text_without_control_tokens_is_read_as_if_unguarded(name: str, text: str) -> None:
    found = unguarded(name, text)
    harmless = control(checkpoint_of(name), unguarded(name, "xz"))
    assume(control(checkpoint_of(name), found) == harmless)
    assert guarded(name, text) == found


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
