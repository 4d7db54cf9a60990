"""Why an answer ended, whatever the upstream calls it."""

from starlette.testclient import TestClient

from tests.upstream.playing import AnswerReader, PlayingServer, delta
from tests.upstream.quirks import PARIS, PARIS_JSON, Quirk, call, calls, check, reads

QUIRKS = (
    Quirk("an end that claims calls", ({"content": "Yes"},), text="Yes", ends=delta("tool_calls")),
    Quirk(
        "an end that claims none",
        (call(PARIS_JSON),),
        **calls(PARIS),
        ends=delta("stop"),
    ),
    Quirk(
        "another name for the limit",
        ({"content": "Yes"},),
        text="Yes",
        finish="length",
        ends=delta("max_tokens"),
    ),
    *(
        Quirk(f"an end as {reason}", ({"content": "Yes"},), "", "Yes", (), ours, ends=delta(reason))
        for ours, reasons in (
            ("stop", ("FINISH_REASON_STOP", "completed", "FinishReason.STOP", "<|im_end|>")),
            ("length", ("max_length", "maxTokens", "token_limit", "context_length_exceeded")),
        )
        for reason in reasons
    ),
    *(
        Quirk(f"an end as {end}", ({"content": "Yes"},), "", "Yes", (), "length", ends=end)
        for end in (
            {"choices": [{"delta": {}, "finishReason": "MAX_TOKENS"}]},
            {"choices": [{"delta": {}, "stop_reason": "max_tokens"}]},
            {"choices": [{"delta": {"finish_reason": {"type": "length"}}}]},
            {"choices": [{"delta": {}}], "finish_reason": "length"},
        )
    ),
    Quirk(
        "an end that is called null before it comes",
        (delta("null", content="Ye"), delta("None", content="s")),
        text="Yes",
    ),
    Quirk(
        "the limit in capitals",
        ({"content": "Y"},),
        "",
        "Y",
        (),
        "length",
        ends=delta("MAX_TOKENS"),
    ),
    Quirk(
        "an empty reason in each piece",
        (delta("", content="Ye"), delta("", content="s")),
        text="Yes",
    ),
    Quirk(
        "the last words with the reason",
        ({"content": "Ye"},),
        text="Yes",
        finish="length",
        ends=delta("length", content="s"),
    ),
    Quirk("no reason before the end", ({"content": "Yes"},), text="Yes", ends=delta(None)),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)
