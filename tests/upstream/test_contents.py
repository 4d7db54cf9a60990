"""The text and the reasoning of a message, whatever form its content has."""

from starlette.testclient import TestClient

from tests.upstream.playing import AnswerReader, PlayingServer
from tests.upstream.quirks import PARIS, PARIS_JSON, Quirk, check, reads

QUIRKS = (
    *(
        Quirk(f"reasoning in {name}", ({name: "Hm."}, {"content": "Yes"}), "Hm.", "Yes")
        for name in ("reasoning_content", "reasoning", "thinking", "analysis", "reasoningContent")
    ),
    Quirk(
        "reasoning in a gateway's own field",
        ({"provider_specific_fields": {"reasoning_content": "Hm."}}, {"content": "Yes"}),
        "Hm.",
        "Yes",
    ),
    Quirk(
        "reasoning next to the delta",
        ({"choices": [{"delta": {}, "reasoning": "Hm."}]}, {"content": "Yes"}),
        "Hm.",
        "Yes",
    ),
    *(
        Quirk(f"a thought as {part}", ({"content": [part]}, {"content": "Yes"}), "Hm.", "Yes")
        for part in (
            {"text": "Hm.", "thought": True},
            {"type": "think", "think": "Hm."},
            {"type": "reasoning_text", "text": {"value": "Hm."}},
        )
    ),
    Quirk("a number as content", ({"content": 42},), text="42"),
    Quirk("JSON as content", ({"content": {"city": "Paris"}},), text=PARIS_JSON),
    Quirk(
        "reasoning under several names at once",
        ({"reasoning": "Hm.", "reasoning_content": "Hm.", "content": None}, {"content": "Yes"}),
        "Hm.",
        "Yes",
    ),
    Quirk(
        "reasoning as details",
        (
            {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "xyz"}]},
            {"content": "Yes"},
        ),
        "Hm.",
        "Yes",
    ),
    Quirk(
        "content in parts, of which one is thinking",
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]},
            {"content": [{"type": "text", "text": "Yes"}]},
        ),
        "Hm.",
        "Yes",
    ),
    *(
        Quirk(
            f"a call as {part}",
            ({"content": [{"text": "I look."}, part]},),
            "",
            "I look.",
            (PARIS,),
            "tool_calls",
        )
        for part in (
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
            {"functionCall": {"name": "get_weather", "args": {"city": "Paris"}}},
        )
    ),
    *(
        Quirk(
            f"reasoning details as {type(details).__name__}",
            ({"reasoning_details": details}, {"content": "Yes"}),
            "Hm.",
            "Yes",
        )
        for details in ({"text": "Hm."}, ["Hm."], "Hm.")
    ),
    Quirk("a switch named reasoning", ({"reasoning": True, "content": "Yes"},), text="Yes"),
    Quirk("a part in place of content", ({"content": {"text": "Yes"}},), text="Yes"),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)
