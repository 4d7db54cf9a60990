"""Formats that a server leaves in its text, where models.yaml names no family."""

import pytest
from starlette.testclient import TestClient

from mlx_server.events import Event, TextDelta
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext, TextParser
from mlx_server.upstream.text_families import LeakedFormatParser
from tests.upstream.playing import AnswerReader, PlayingServer
from tests.upstream.quirks import PARIS, PARIS_JSON, Quirk, check, reads

FOREIGN_CALLS = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{PARIS_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{PARIS_JSON}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
}


QUIRKS = (
    *(
        Quirk(
            f"a call as {family} writes it, where no family is named",
            tuple({"content": sign} for sign in f"I look.\n\n{written}"),
            "",
            "I look.",
            (PARIS,),
            "tool_calls",
            repairs=("unmarked tool_calls[0]",),
            family="plain",
        )
        for family, written in FOREIGN_CALLS.items()
    ),
    Quirk(
        "a call that is quoted in the thoughts",
        tuple({"content": sign} for sign in f"<think>{FOREIGN_CALLS['kimi_k2']}</think>Yes"),
        FOREIGN_CALLS["kimi_k2"],
        "Yes",
        repairs=("reasoning reasoning_content",),
        family="plain",
    ),
    Quirk(
        "thoughts as Mistral writes them, where no family is named",
        tuple({"content": sign} for sign in "[THINK]Hm.[/THINK]Yes"),
        "Hm.",
        "Yes",
        repairs=("reasoning reasoning_content",),
        family="plain",
    ),
    Quirk(
        "signs of which no delimiter becomes",
        ({"content": "a <|to"}, {"content": "ol b"}, {"content": " <"}),
        text="a <|tool b <",
        family="plain",
    ),
)


@pytest.mark.slow
@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)


class CountingParser(TextParser):
    feeds = 0

    def feed(self, token: int, text: str) -> list[Event]:
        self.feeds += 1
        return super().feed(token, text)


def test_signs_that_begin_no_delimiter_are_parsed_together() -> None:
    context = ParseContext(tools=(Tool("f", "", {}),))
    inner = CountingParser(context)
    parser = LeakedFormatParser(inner, context, only_harmony=False)
    events = [*parser.feed(-1, "a" + "< <|" * 1000), *parser.finish(cut=False)]
    texts = (event.text for event in events if isinstance(event, TextDelta))
    assert "".join(texts) == "a" + "< <|" * 1000
    assert inner.feeds < 10
