"""What an upstream sends twice is read once."""

from starlette.testclient import TestClient

from tests.upstream.playing import AnswerReader, PlayingServer, delta
from tests.upstream.quirks import (
    CALL_JSON,
    NOW,
    PARIS,
    PARIS_JSON,
    Quirk,
    call,
    calls,
    check,
    indexed,
    reads,
)

QUIRKS = (
    Quirk(
        "thoughts next to the content and in it",
        (
            {"reasoning": "Well", "content": "<think>Well"},
            {"reasoning": ", hm.", "content": ", hm.</think>"},
            {"content": "Yes"},
        ),
        "Well, hm.",
        "Yes",
        repairs=("stutter reasoning_content",),
        family="qwen3",
    ),
    Quirk(
        "a call in the content and as such",
        ({"content": CALL_JSON}, call(PARIS_JSON), indexed(1, name="get_time", arguments="{}")),
        **calls(PARIS, NOW),
        repairs=("unmarked tool_calls[0]", "stutter tool_calls"),
    ),
    Quirk(
        "the whole message once more at the end",
        (
            {"content": "Yes"},
            {"choices": [{"message": {"content": "Yes"}, "finish_reason": "stop"}]},
        ),
        text="Yes",
    ),
    Quirk(
        "all of the text in each piece",
        (
            {"content": "I"},
            {"content": "I am"},
            {"content": "I am here."},
            {"content": "I am here."},
        ),
        text="I am here.",
        repairs=("stutter content",),
    ),
    Quirk(
        "all of the reasoning and then of the text in each piece",
        (
            {"reasoning": "So"},
            {"reasoning": "So, well"},
            {"reasoning": "So, well, yes."},
            {"content": "It"},
            {"content": "It rains"},
            {"content": "It rains now."},
        ),
        "So, well, yes.",
        "It rains now.",
        repairs=("stutter reasoning_content", "stutter content"),
    ),
    Quirk(
        "all of the text in each of two pieces",
        ({"content": "It rains"}, {"content": "It rains now."}),
        text="It rains now.",
        repairs=("stutter content",),
    ),
    *(
        Quirk(f"pieces that look alike, such as {pieces[1]!r}", said, text="".join(pieces))
        for pieces in (("1", "10", "0"), ("ha", "ha", "haha"), ("-", "--", "---"), ("a", "ab", "c"))
        for said in [tuple({"content": piece} for piece in pieces)]
    ),
    Quirk(
        "all of the text once more with the reason",
        ({"content": "It "}, {"content": "rains."}),
        text="It rains.",
        ends=delta("stop", content="It rains."),
        repairs=("stutter content",),
    ),
    Quirk(
        "a piece that is held when the answer ends",
        ({"content": "1"}, {"content": "10"}),
        text="110",
        ends=delta(None),
    ),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)
