"""What servers are known to send in place of what they should: read alike by every endpoint."""

import pytest
from starlette.testclient import TestClient

from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    Json,
    PlayingServer,
    as_response,
    delta,
    in_chunks,
    in_one,
    streamed,
    whole,
)
from tests.upstream.quirks import (
    CALL_JSON,
    NOW,
    PARIS,
    PARIS_JSON,
    ROME,
    WEATHER,
    Quirk,
    call,
    calls,
    check,
    indexed,
    reads,
)

ANALYSIS = "<|channel|>analysis<|message|>"


FINAL = "<|start|>assistant<|channel|>final<|message|>"


COMMENTARY = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
)


def numbered(index: int, text: str, finish: str | None = None) -> Json:
    """An answer of several."""
    return {"index": index, "delta": {"content": text}, "finish_reason": finish}


QUIRKS = (
    Quirk("an answer as it should be", ({"content": "Hello"},), text="Hello"),
    Quirk(
        "other thoughts in the content",
        ({"reasoning": "Well."}, {"content": "<think> Hm.</think>"}, {"content": "Yes"}),
        "Well.Hm.",
        "Yes",
        repairs=("reasoning reasoning_content",),
        family="qwen3",
    ),
    Quirk(
        "thinking tags in the content",
        ({"content": "<thi"}, {"content": "nk>Hm.</think>"}, {"content": "Yes"}),
        "Hm.",
        "Yes",
        repairs=("reasoning reasoning_content",),
        family="qwen3",
    ),
    Quirk(
        "a closing tag at the end of the reasoning field",
        ({"reasoning": "Hm.</think>\n\nYes"},),
        "Hm.",
        "Yes",
        repairs=("reasoning content",),
        family="qwen3",
    ),
    Quirk(
        "Harmony as literal text",
        ({"content": f"{ANALYSIS}Hm.<|end|>"}, {"content": f"{FINAL}Yes<|return|>"}),
        "Hm.",
        "Yes",
        repairs=("reasoning reasoning_content",),
    ),
    Quirk(
        "Harmony without its control tokens",
        ({"content": "analysisI think."}, {"content": "assistantfinalYes"}),
        "I think.",
        "Yes",
        repairs=("reasoning reasoning_content",),
    ),
    Quirk(
        "Harmony's final message in the reasoning field",
        ({"reasoning": f"Hm.<|end|>{FINAL}Yes"},),
        "Hm.",
        "Yes",
        repairs=("reasoning content",),
    ),
    Quirk(
        "a Harmony call in the content",
        ({"content": f"{ANALYSIS}Hm.<|end|>{COMMENTARY}{PARIS_JSON}<|call|>"},),
        "Hm.",
        **calls(PARIS),
        repairs=("reasoning reasoning_content", "unmarked tool_calls[0]"),
    ),
    Quirk(
        "a Harmony call in the reasoning field",
        ({"reasoning": f"Hm.<|end|>{COMMENTARY}{PARIS_JSON}"},),
        "Hm.",
        **calls(PARIS),
    ),
    Quirk(
        "a call as JSON in the content",
        ({"content": CALL_JSON},),
        **calls(PARIS),
        repairs=("unmarked tool_calls[0]",),
    ),
    Quirk(
        "a call in a code fence",
        ({"content": f"```json\n{CALL_JSON}\n```"},),
        **calls(PARIS),
        repairs=("unmarked tool_calls[0]",),
    ),
    Quirk(
        "calls in an array",
        ({"content": f"[{CALL_JSON}, {CALL_JSON.replace('Paris', 'Rome')}]"},),
        **calls(PARIS, ROME),
        repairs=("unmarked tool_calls[0]", "unmarked tool_calls[1]"),
    ),
    Quirk(
        "a call under other names",
        ({"content": '{"tool": "get_weather", "parameters": {"city": "Paris"}}'},),
        **calls(PARIS),
        repairs=("unmarked tool_calls[0]",),
    ),
    Quirk(
        "a call as JSON in the reasoning field",
        ({"reasoning": f"I call it.\n{CALL_JSON}"},),
        f"I call it.\n{CALL_JSON}",
        **calls(PARIS),
        repairs=("reasoning tool_calls[0]",),
    ),
    Quirk(
        "a call in tags in the content",
        ({"content": f"<tool_call>\n{CALL_JSON}\n</tool_call>"},),
        **calls(PARIS),
        repairs=("unmarked tool_calls[0]",),
        family="qwen3",
    ),
    *(
        Quirk(f"reasoning in {name}", ({name: "Hm."}, {"content": "Yes"}), "Hm.", "Yes")
        for name in ("reasoning_content", "reasoning")
    ),
    Quirk(
        "reasoning as details alone",
        (
            {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "xyz"}]},
            {"content": "Yes"},
        ),
        "Hm.",
        "Yes",
    ),
    Quirk(
        "a call in the content and as such",
        ({"content": CALL_JSON}, call(PARIS_JSON), indexed(1, name="get_time", arguments="{}")),
        **calls(PARIS, NOW),
        repairs=("unmarked tool_calls[0]", "stutter tool_calls"),
    ),
    Quirk(
        "answers that were not asked for",
        (
            {"choices": [numbered(1, "No"), numbered(0, "Yes")]},
            {"choices": [numbered(1, "No", "length")]},
        ),
        text="Yes",
        unmet=("choices: the upstream sent several, this is the first",),
    ),
    Quirk(
        "a number that is not 0",
        ({"choices": [numbered(5, "Yes", "stop")]},),
        text="Yes",
        ends={"choices": []},
    ),
    Quirk("text as a completion has it", ({"choices": [{"text": "Yes"}]},), text="Yes"),
    Quirk(
        "pieces with nothing but a role",
        ({"role": "assistant"}, {"content": "Ye"}, {"role": "assistant"}, {"content": "s"}),
        text="Yes",
    ),
    Quirk("null choices", ({"choices": None}, {"content": "Yes"}), text="Yes"),
    Quirk("an end that claims calls", ({"content": "Yes"},), text="Yes", ends=delta("tool_calls")),
    Quirk("an end that claims none", (call(PARIS_JSON),), **calls(PARIS), ends=delta("stop")),
    *(
        Quirk(f"an end as {reason}", ({"content": "Ye"},), "", "Yes", (), ours, ends=end)
        for reason, ours in (
            ("STOP", "stop"),
            ("MAX_TOKENS", "length"),
            ("time_limit", "length"),
            ("end_turn", "stop"),
        )
        for end in [delta(reason, content="s")]
    ),
    Quirk(
        "an empty reason in each piece",
        (delta("", content="Ye"), delta("", content="s")),
        text="Yes",
    ),
    Quirk("no reason before the end", ({"content": "Yes"},), text="Yes", ends=delta(None)),
    Quirk(
        "the usage in the middle",
        ({"content": "Ye"}, USAGE, {"content": "s"}),
        text="Yes",
    ),
)


@pytest.mark.slow
@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)


@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_an_upstream_that_does_not_stream(
    read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning": "Hm."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    upstream.plays(whole({"choices": [choice], "usage": USAGE["usage"]}))
    found = read_answer(clients["gpt_oss"], {})
    assert (found["reasoning"], found["text"], found["repairs"]) == ("Hm.", "Yes", [])


@pytest.mark.parametrize("name", ["content", "reasoning_content", "tool_calls"])
def test_an_answer_that_repeats_itself_is_ended(
    name: str, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    line = "I think that is all there is to say about it, my friend. "
    call = [{"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": line}}]
    piece = delta(None, **{name: call if name == "tool_calls" else line})
    upstream.plays(streamed(*[piece] * 2_000, delta("length"), USAGE))
    found = in_one(clients["plain"], {"tools": [WEATHER]})
    assert max(len(found["text"]), len(found["reasoning"])) < 130 * len(line)
    assert found["finish"] == "stop"
    assert "it repeated the same 15 words, so it was ended" in str(found["unmet"])
