"""What servers are known to send in place of what they should: read alike by every endpoint."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.upstream.playing import (
    USAGE,
    AnswerReader,
    Json,
    PlayingServer,
    Reply,
    as_message,
    as_response,
    delta,
    gateway,
    in_chunks,
    in_one,
    streamed,
    whole,
)

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: Json = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
PARIS = {"name": "get_weather", "arguments": {"city": "Paris"}}
NOW: Json = {"name": "get_time", "arguments": {}}
NOTHINGS: tuple[Any, ...] = ({}, "{}")
ROME = {"name": "get_weather", "arguments": {"city": "Rome"}}


@dataclass(frozen=True)
class Quirk:
    name: str
    deltas: tuple[Any, ...]
    reasoning: str = ""
    text: str = ""
    calls: tuple[Json, ...] = ()
    finish: str = "stop"
    repairs: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    family: str = "gpt_oss"
    ends: Json = field(default_factory=lambda: delta("stop"))

    @property
    def reply(self) -> Reply:
        values = [each if "choices" in each else delta(**each) for each in self.deltas]
        return streamed(*values, self.ends, USAGE)

    @property
    def expected(self) -> Json:
        return {
            "reasoning": self.reasoning,
            "text": self.text,
            "calls": list(self.calls),
            "finish": self.finish,
            "repairs": list(self.repairs),
            "unmet": list(self.unmet),
        }


def call(arguments: Any, name: str = "get_weather", **more: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": function, **more}]}


def indexed(index: Any, id: str | None = None, **function: Any) -> Json:
    """A piece of a call."""
    return {"tool_calls": [{"index": index, "id": id, "function": function}]}


def numbered(index: int, text: str, finish: str | None = None) -> Json:
    """An answer of several."""
    return {"index": index, "delta": {"content": text}, "finish_reason": finish}


def calls(*made: Json, **more: Any) -> Json:
    return {"calls": made, "finish": "tool_calls", **more}


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
COMMENTARY = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
)
PARIS_JSON = '{"city": "Paris"}'
CALL_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'

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

QUIRKS = [
    Quirk("an answer as it should be", ({"content": "Hello"},), text="Hello"),
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
        "other thoughts in the content",
        ({"reasoning": "Well."}, {"content": "<think> Hm.</think>"}, {"content": "Yes"}),
        "Well.Hm.",
        "Yes",
        repairs=("reasoning reasoning_content",),
        family="qwen3",
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
    Quirk(
        "a call in the content and as such",
        ({"content": CALL_JSON}, call(PARIS_JSON), indexed(1, name="get_time", arguments="{}")),
        **calls(PARIS, NOW),
        repairs=("unmarked tool_calls[0]", "stutter tool_calls"),
    ),
    Quirk("a call as it should be", (call(PARIS_JSON),), **calls(PARIS)),
    *(
        Quirk(f"a call as {list(said)}", (said,), **calls(PARIS))
        for function in [{"name": "get_weather", "arguments": PARIS_JSON}]
        for said in (
            {"toolCalls": [{"function": function}]},
            {"tool_call": {"function": function}},
            {"tool_calls": json.dumps([{"function": function}])},
            {"tool_calls": [None, {"function": json.dumps(function)}]},
            {"tool_calls": {"0": {"tool_name": "get_weather", "tool_input": {"city": "Paris"}}}},
            {"choices": [{"delta": {}, "tool_calls": [{"function": function}]}]},
        )
    ),
    *(
        Quirk(
            f"the name after the arguments, {index}",
            (indexed(index, arguments=PARIS_JSON), indexed(index, "a", name="get_weather")),
            **calls(PARIS),
        )
        for index in (0, None)
    ),
    *(
        Quirk(
            f"arguments {what}", (call(made),), **calls(PARIS), repairs=(f"{kind} tool_calls[0]",)
        )
        for what, made, kind in (
            ("that are the whole call", CALL_JSON, "format"),
            ("without their braces", '"city": "Paris"', "json"),
            ("in a list", f"[{PARIS_JSON}]", "format"),
            ("as a text in a text in a text", json.dumps(json.dumps(PARIS_JSON)), "json"),
        )
    ),
    Quirk(
        "a call in pieces",
        (
            call("", name="get_weather"),
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": '"Paris"}'}}]},
        ),
        **calls(PARIS),
    ),
    Quirk("arguments as an object", (call({"city": "Paris"}),), **calls(PARIS)),
    Quirk(
        "arguments as a text in a text",
        (call('"{\\"city\\": \\"Paris\\"}"'),),
        **calls(PARIS),
        repairs=("json tool_calls[0]",),
    ),
    Quirk(
        "arguments with a slip",
        (call("{'city': 'Paris',}"),),
        **calls(PARIS),
        repairs=("json tool_calls[0]",),
    ),
    Quirk(
        "thinking before the arguments",
        (call(f"Oops, typo? {PARIS_JSON}"),),
        **calls(PARIS),
        repairs=("fences tool_calls[0]",),
    ),
    Quirk(
        "several objects as one call's arguments",
        (call(f'{PARIS_JSON}{{"city": "Rome"}}'),),
        **calls(PARIS, ROME),
        repairs=("format tool_calls[0]", "format tool_calls[1]"),
    ),
    Quirk(
        "arguments of the wrong type",
        (call('{"city": "Paris", "days": "3"}'),),
        **calls({"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}),
        repairs=("type tool_calls[0].function.arguments.days",),
    ),
    Quirk(
        "control tokens in the name",
        (call(PARIS_JSON, name="get_weather<|channel|>commentary"),),
        **calls(PARIS),
        repairs=("name tool_calls[0].function.name",),
    ),
    Quirk(
        "a header in place of the name",
        (call(PARIS_JSON, name="assistant<|channel|>analysis"),),
        **calls(PARIS),
        repairs=("name tool_calls[0]",),
    ),
    Quirk(
        "no id and no index",
        ({"tool_calls": [{"function": {"name": "get_weather", "arguments": PARIS_JSON}}]},),
        **calls(PARIS),
    ),
    Quirk(
        "one index for all calls",
        (call(PARIS_JSON), call('{"city": "Rome"}', id="call_2")),
        **calls(PARIS, ROME),
    ),
    Quirk(
        "the older function_call",
        ({"function_call": {"name": "get_weather", "arguments": PARIS_JSON}},),
        **calls(PARIS),
    ),
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
        "the whole message once more at the end",
        (
            {"content": "Yes"},
            {"choices": [{"message": {"content": "Yes"}, "finish_reason": "stop"}]},
        ),
        text="Yes",
    ),
    *(
        Quirk(
            f"an index that is {what}",
            (
                indexed(first, id="a", name="get_weather"),
                indexed(second, id="b", name="get_time"),
                indexed(first, arguments=PARIS_JSON),
                indexed(second, arguments="{}"),
            ),
            **calls(PARIS, NOW),
            repairs=tuple(f"type tool_calls[{n}].index" for n in (0, 1) if type(first) is not int),
        )
        for what, first, second in (
            ("huge", 10**9, 10**12),
            ("negative", -1, -2),
            ("a text", "0", "1"),
            ("a fraction", 0.0, 1.0),
            ("out of order", 7, 2),
        )
    ),
    Quirk(
        "all of the arguments in each piece",
        (indexed(0, name="get_weather", arguments='{"ci'), indexed(0, arguments=PARIS_JSON)),
        **calls(PARIS),
    ),
    Quirk("a call that is sent twice", (call(PARIS_JSON), call(PARIS_JSON)), **calls(PARIS)),
    Quirk(
        "all of the name in each piece",
        (indexed(0, name="get_"), indexed(0, name="get_weather", arguments=PARIS_JSON)),
        **calls(PARIS),
    ),
    Quirk(
        "objects as pieces of the arguments",
        (
            indexed(0, name="get_weather", arguments={"city": "Paris"}),
            indexed(0, arguments={"days": 3}),
        ),
        **calls({"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}),
    ),
    *(
        Quirk(
            f"no arguments before the arguments, as {type(nothing).__name__}",
            (indexed(0, name="get_weather", arguments=nothing), indexed(0, arguments=PARIS_JSON)),
            **calls(PARIS),
        )
        for nothing in NOTHINGS
    ),
    Quirk("a call of nothing", ({"tool_calls": [{"function": None}]}, {"content": "Y"}), text="Y"),
    Quirk(
        "a custom call",
        ({"tool_calls": [{"custom": {"name": "get_weather", "input": PARIS_JSON}}]},),
        **calls(PARIS),
    ),
    Quirk(
        "arguments that are a list",
        (call([1]),),
        text='{"name": "get_weather", "arguments": "[1]"}',
        unmet=("tool_calls[0]: what the upstream sent as a call can't be made, so it is text",),
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
        "an answer without a list",
        ({"choices": {"delta": {"content": "Yes"}}},),
        text="Yes",
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
    Quirk("half an emoji", ({"content": "\ud83d"}, {"content": "Yes"}), text="\ufffdYes"),
    Quirk(
        "what is no number",
        ({"choices": [{"delta": {"content": "Yes"}, "logprobs": float("nan")}]},),
        text="Yes",
    ),
    *(
        Quirk(
            f"calls without an index, {what}",
            (
                indexed(None, ids[0], name="get_weather", arguments=PARIS_JSON),
                indexed(None, ids[1], name="get_time", arguments="{}"),
            ),
            **calls(PARIS, NOW),
        )
        for what, ids in (("with ids", ("a", "b")), ("nor an id", (None, None)))
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
    Quirk(
        "arguments with the reason",
        (indexed(1, "a", name="get_weather", arguments='{"city": '),),
        **calls(PARIS),
        ends=delta("tool_calls", **indexed(1, arguments='"Paris"}')),
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
    Quirk("text as a completion has it", ({"choices": [{"text": "Yes"}]},), text="Yes"),
    Quirk(
        "the usage in the middle",
        ({"content": "Ye"}, USAGE, {"content": "s"}),
        text="Yes",
    ),
    Quirk(
        "pieces with nothing but a role",
        ({"role": "assistant"}, {"content": "Ye"}, {"role": "assistant"}, {"content": "s"}),
        text="Yes",
    ),
    Quirk(
        "a role that is not the assistant's",
        ({"role": "system", "content": "Yes"},),
        text="Yes",
    ),
    Quirk(
        "the name in pieces",
        (
            indexed(0, "a", name="get_"),
            indexed(0, name="weather"),
            indexed(0, arguments=PARIS_JSON),
        ),
        **calls(PARIS),
    ),
    Quirk(
        "the name and the id in each piece",
        tuple(
            indexed(0, "a", name="get_weather", arguments=piece)
            for piece in ('{"city"', ': "Pa', 'ris"}')
        ),
        **calls(PARIS),
    ),
    Quirk(
        "the id in each piece and no index",
        (
            indexed(None, "a", name="get_weather"),
            indexed(None, "a", arguments='{"city": '),
            indexed(None, "a", arguments='"Paris"}'),
        ),
        **calls(PARIS),
    ),
    Quirk(
        "another id in each piece",
        (
            indexed(0, "a", name="get_weather"),
            indexed(0, "b", arguments='{"city": '),
            indexed(0, "c", arguments='"Paris"}'),
        ),
        **calls(PARIS),
    ),
    Quirk(
        "another id in each piece, and the name",
        tuple(
            indexed(0, id, name="get_weather", arguments=piece)
            for id, piece in (("a", '{"city"'), ("b", ': "Pa'), ("c", 'ris"}'))
        ),
        **calls(PARIS),
    ),
    Quirk(
        "the older function_call in pieces",
        (
            {"function_call": {"name": "get_weather", "arguments": ""}},
            {"function_call": {"arguments": '{"city": '}},
            {"function_call": {"arguments": '"Paris"}'}},
        ),
        **calls(PARIS),
        ends=delta("function_call"),
    ),
    *(
        Quirk(f"an answer as {value}", (value,), text="Yes")
        for value in (
            {"choices": [{"delta": "Yes"}]},
            {"choices": [{"delta": [{"content": "Yes"}]}]},
            {"choices": ["Yes"]},
            {"choices": [None, {"delta": {"content": "Yes"}}]},
            {"choices": {"0": {"delta": {"content": "Yes"}}}},
        )
    ),
    Quirk("null choices", ({"choices": None}, {"content": "Yes"}), text="Yes"),
    Quirk("an empty choice", ({"choices": [None]}, {"content": "Yes"}), text="Yes"),
]


@pytest.fixture(scope="module")
def clients(upstream: PlayingServer) -> Iterator[dict[str, TestClient]]:
    with ExitStack() as on:
        yield {
            family: on.enter_context(gateway(upstream.url, {"up": {"family": family}}))
            for family in {quirk.family for quirk in QUIRKS}
        }


@pytest.mark.tables
@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.name)
@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    upstream.plays(quirk.reply)
    assert read_answer(clients[quirk.family], {"tools": [WEATHER, TIME]}) == quirk.expected


@pytest.mark.tables
@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.name)
def test_it_is_read_for_messages(
    quirk: Quirk, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    upstream.plays(quirk.reply)
    found = as_message(clients[quirk.family], {"tools": [WEATHER, TIME]})
    assert found == {key: quirk.expected[key] for key in found}


@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_an_upstream_that_does_not_stream(
    read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning": "Hm."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    upstream.plays(whole({"choices": [choice], "usage": USAGE["usage"]}))
    found = read_answer(clients["gpt_oss"], {})
    assert (found["reasoning"], found["text"], found["repairs"]) == ("Hm.", "Yes", [])


@pytest.mark.parametrize("read_answer", [in_one, in_chunks, as_response])
def test_the_calls_of_a_whole_message_stand_alone_however_they_are_numbered(
    read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    made = [call(PARIS_JSON), call('{"x": 1}', name="launch")]
    message = {"content": None, "tool_calls": [each["tool_calls"][0] for each in made]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    upstream.plays(whole({"choices": [choice], "usage": USAGE["usage"]}))
    found = read_answer(clients["gpt_oss"], {"tools": [WEATHER, TIME]})
    assert found["calls"] == [PARIS]
    assert found["text"].startswith('{"name": "launch"')
    assert len(found["unmet"]) == 1


def test_usage_that_is_missing_is_estimated_and_reported(
    clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    upstream.plays(streamed(delta(content="Yes, it is."), delta("stop")))
    found = in_one(clients["gpt_oss"], {})
    assert found["repairs"] == ["usage usage"]
