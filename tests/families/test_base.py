"""What a record of a family says of itself, and the defaults that most families share."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server.errors import ContextTooLong
from mlx_server.families.harmony import GPT_OSS
from mlx_server.families.json_families import QWEN3
from mlx_server.families.markup import MarkupFamily
from mlx_server.families.named_families import MISTRAL
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.parsers.markup_parser import MarkupLayout
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.system.sandbox.chat_template import ChatTemplate
from mlx_server.tool_parsers.formats import HERMES
from mlx_server.tool_parsers.formats import MISTRAL as MISTRALS_CALLS

TOOLS = (Tool("f"),)


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Checkpoint:
    return read_checkpoint(demo_path)


TYPES, OTHER = ("other", "tiny"), ("other", "tin")
MARKS, ABSENT = ("{{", "messages"), ("{{", "absent")


@pytest.mark.parametrize(
    ("types", "marks", "evidence"),
    [
        ((), (), 0),
        (TYPES, (), 1),
        ((), MARKS, 2),
        (TYPES, MARKS, 3),
        (OTHER, (), 0),
        ((), ABSENT, 0),
        (TYPES, ABSENT, 0),
        (OTHER, MARKS, 0),
    ],
)
def test_what_is_asked_for_must_be_there_and_then_counts(
    unknown: Checkpoint, types: tuple[str, ...], marks: tuple[str, ...], evidence: int
) -> None:
    family = MarkupFamily("f", model_types=types, template_markers=marks)
    assert family.evidence(unknown) == evidence


def with_template(checkpoint: Checkpoint, template: str) -> Checkpoint:
    return replace(checkpoint, template=ChatTemplate(template))


def test_tools_in_the_prompt_are_called_as_hermes_does_and_as_the_family_does() -> None:
    taught = MISTRAL.with_tools_in_prompt()
    assert taught.tools_in_prompt
    assert taught.layout_with(TOOLS).call_formats == (HERMES, MISTRALS_CALLS)
    assert taught.layout_with().call_formats == (MISTRALS_CALLS,), "without tools it is not taught"
    hermes = QWEN3.with_tools_in_prompt().layout_with(TOOLS).call_formats
    assert hermes.count(HERMES) == 1
    assert hermes[0] == HERMES


@pytest.mark.parametrize(
    ("prefix", "layout", "space"),
    [
        ("\n</think>\n\n", MarkupLayout(), "\n\n"),
        ("</think>", MarkupLayout(), ""),
        ("\n</think>\n\n", MarkupLayout(trims=False), ""),
        ("\n</think>\n\n", MarkupLayout(trims_text=False), ""),
        ("", MarkupLayout(), ""),
    ],
)
def test_the_white_space_after_reasoning_is_that_of_the_prefix_where_it_is_trimmed(
    prefix: str, layout: MarkupLayout, space: str
) -> None:
    assert MarkupFamily("f", layout, answer_prefix=prefix).layout_with().after_reasoning == space


@pytest.mark.parametrize(
    ("template", "thinks"), [("{{ '<think>' }}", True), ("{{ messages }}", False)]
)
def test_a_model_thinks_if_its_template_has_the_tags(
    demo: Checkpoint, template: str, thinks: bool
) -> None:
    checkpoint = with_template(demo, template)
    assert QWEN3.thinks(checkpoint) is thinks
    assert QWEN3.reasons(checkpoint) is thinks
    assert QWEN3.reasoning_pairs(checkpoint) == ((("<think>", "</think>"),) if thinks else ())


def test_a_continued_message_is_in_its_reasoning_or_in_its_text(unknown: Checkpoint) -> None:
    begun = Message("assistant", reasoning="Hm")
    assert QWEN3.open_end(unknown, begun) == "<think>"
    assert QWEN3.open_end(unknown, replace(begun, content="Yes")) == ""
    assert QWEN3.open_end(unknown, Message("assistant")) == ""
    assert GPT_OSS.reasons(unknown)
    assert GPT_OSS.open_end(unknown, begun) == "<|channel|>analysis<|message|>"


def test_a_long_conversation_is_counted_before_a_renderer_of_the_family_gets_it(
    demo: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = RenderedPrompt([1])
    monkeypatch.setattr("mlx_server.prompts.harmony.prompt.render", lambda *_: rendered)
    message = Message("user", "word " * 50)
    for count, most, fits in ((1, 10, False), (1, 49, True), (10, 60, False), (10, None, True)):
        asked = Conversation((message,) * count)
        if fits:
            assert GPT_OSS.render(demo, asked, most) is rendered
            continue
        with pytest.raises(ContextTooLong):
            GPT_OSS.render(demo, asked, most)
