"""Streams of known providers and servers, with all that is special to each."""

from tests.upstream.dialect import COUNTED, DONE, LAST, THOUGHT, Dialect, choice, chunk, function
from tests.upstream.quirks import NOW, PARIS, PARIS_JSON, ROME

PROVIDERS = [
    Dialect(
        "OpenAI",
        (
            choice({"role": "assistant", "content": "", "refusal": None}, logprobs=None),
            choice(
                {"tool_calls": [function("get_weather", "", id="call_1", index=0)]}, logprobs=None
            ),
            choice({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
            choice({"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]}),
            choice(finish="tool_calls"),
            {**LAST, "service_tier": "default", "system_fingerprint": None, "obfuscation": "x"},
            DONE,
        ),
        calls=(PARIS,),
        finish="tool_calls",
    ),
    Dialect(
        "llama.cpp",
        (
            chunk(said={"role": "assistant", "content": None}, system_fingerprint="b1"),
            chunk(said={"reasoning_content": "Hm."}),
            chunk(said={"content": "Yes"}),
            chunk("stop"),
            {**LAST, "timings": {"prompt_n": 7, "predicted_n": 5, "cache_n": 0}},
            DONE,
        ),
        "Hm.",
        "Yes",
        family="plain",
    ),
    Dialect(
        "Anthropic",
        (
            chunk(said={"role": "assistant", "content": ""}),
            chunk(said={"content": "Yes"}),
            chunk("stop", usage={**COUNTED, "prompt_tokens_details": None}),
            DONE,
        ),
        text="Yes",
        family="plain",
    ),
    Dialect(
        "OpenRouter",
        (
            ": OPENROUTER PROCESSING\n\n" * 3,
            chunk(said={"role": "assistant", "content": "", "reasoning": "Hm."}, provider="X"),
            chunk(
                said={
                    "content": "",
                    "reasoning": "!",
                    "reasoning_details": [{"type": "reasoning.text", "text": "!", "index": 0}],
                }
            ),
            ": OPENROUTER PROCESSING\n\n",
            choice({"content": "Yes"}, native_finish_reason=None),
            choice({"content": ""}, "stop", native_finish_reason="STOP"),
            {**LAST, "usage": {**COUNTED, "cost": 0.1, "is_byok": False}},
            DONE,
        ),
        "Hm.!",
        "Yes",
    ),
    Dialect(
        "Gemini with thoughts",
        (
            chunk(said={"content": "<thought>Hm.", **THOUGHT}, usage=COUNTED),
            chunk(said={"content": " So.", **THOUGHT}, usage=COUNTED),
            chunk(said={"content": "</thought>Yes"}, usage=COUNTED),
            chunk("stop", {"role": "assistant"}, usage=COUNTED),
            DONE,
        ),
        "Hm. So.",
        "Yes",
        repairs=("reasoning content", "reasoning reasoning_content"),
        family="plain",
    ),
    Dialect(
        "Gemini with calls",
        (
            chunk(
                said={
                    "role": "assistant",
                    "tool_calls": [
                        function("get_weather", PARIS_JSON, id="", extra_content={"google": {}}),
                        function("get_weather", '{"city": "Rome"}', id=""),
                    ],
                },
                usage=COUNTED,
            ),
            chunk("stop", usage=COUNTED),
            DONE,
        ),
        calls=(PARIS, ROME),
        finish="tool_calls",
        family="plain",
    ),
    Dialect(
        "OpenAI on Azure",
        (
            {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]},
            choice(
                {"role": "assistant", "content": "", "refusal": None}, content_filter_results={}
            ),
            choice({"content": "Yes"}, content_filter_results={"hate": {"filtered": False}}),
            {
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": None,
                        "content_filter_results": {"hate": {"filtered": False}},
                        "content_filter_offsets": {"check_offset": 1},
                    }
                ]
            },
            choice(finish="stop"),
            LAST,
            DONE,
        ),
        text="Yes",
    ),
    Dialect(
        "OpenAI's filter on Azure",
        (chunk(said={"content": "Ye"}), choice(finish="content_filter"), LAST, DONE),
        text="Ye",
        unmet=("content: the upstream's content filter ended the answer",),
    ),
    Dialect(
        "vLLM",
        (
            chunk(said={"role": "assistant", "content": ""}, prompt_token_ids=None),
            choice({"reasoning": "Hm.", "reasoning_content": "Hm."}, token_ids=None),
            choice({"tool_calls": [function("get_weather", "", id="call_1")]}),
            choice({"tool_calls": [{"function": {"arguments": '{"city": '}}]}),
            choice({"tool_calls": [{"function": {"arguments": '"Paris"}'}}]}),
            choice({"content": ""}, "tool_calls", stop_reason=200012),
            LAST,
            DONE,
        ),
        "Hm.",
        calls=(PARIS,),
        finish="tool_calls",
    ),
    Dialect(
        "Ollama, whose calls all have the number 0",
        (
            chunk(said={"role": "assistant", "content": "", "reasoning": "Hm."}),
            chunk(
                said={
                    "content": "",
                    "tool_calls": [
                        function("get_weather", PARIS_JSON, id="call_a", index=0),
                        function("get_time", "{}", id="call_b", index=0),
                    ],
                }
            ),
            chunk("stop", {"content": ""}),
            LAST,
            DONE,
        ),
        "Hm.",
        calls=(PARIS, NOW),
        finish="tool_calls",
    ),
]
