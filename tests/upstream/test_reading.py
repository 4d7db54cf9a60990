"""What servers are known to send in place of what they should: read alike by every endpoint."""

import pytest
from starlette.testclient import TestClient

from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    PlayingServer,
    as_response,
    in_chunks,
    in_one,
    whole,
)
from tests.upstream.quirks import CALL_JSON, PARIS, PARIS_JSON, ROME, Quirk, calls, check, reads

ANALYSIS = "<|channel|>analysis<|message|>"


FINAL = "<|start|>assistant<|channel|>final<|message|>"


COMMENTARY = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
)


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
)


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
