"""Streams of known providers and servers, with all that is special to each."""

from tests.upstream.dialect import COUNTED, DONE, LAST, THOUGHT, Dialect, choice, chunk, function
from tests.upstream.quirks import NOW, PARIS, PARIS_JSON, ROME

PROVIDERS = [
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
        "DeepSeek",
        (
            ": keep-alive\n\n",
            chunk(said={"role": "assistant", "content": None, "reasoning_content": ""}),
            chunk(said={"content": None, "reasoning_content": "Hm."}),
            chunk(said={"content": "Yes", "reasoning_content": None}),
            chunk("stop", {"content": "", "reasoning_content": None}, usage=COUNTED),
            DONE,
        ),
        "Hm.",
        "Yes",
        family="deepseek_v3",
    ),
    Dialect(
        "Groq",
        (
            chunk(said={"role": "assistant", "content": ""}, x_groq={"id": "req_1"}),
            chunk(said={"reasoning": "Hm.", "channel": "analysis"}),
            chunk(said={"content": "Yes"}),
            chunk("stop", x_groq={"id": "req_1", "usage": {**COUNTED, "queue_time": 0.1}}),
            DONE,
        ),
        "Hm.",
        "Yes",
    ),
    Dialect(
        "Mistral",
        (
            chunk(
                said={
                    "role": "assistant",
                    "content": [
                        {
                            "type": "thinking",
                            "thinking": [{"type": "text", "text": "Hm."}],
                            "closed": False,
                        }
                    ],
                },
                p="abc",
            ),
            chunk(
                said={
                    "content": [
                        {"type": "thinking", "thinking": [{"type": "text", "text": " So."}]},
                        {"type": "text", "text": "Ye"},
                        {"type": "reference", "reference_ids": [1]},
                    ]
                }
            ),
            chunk(said={"content": "s"}, p="a"),
            chunk("stop", {"content": ""}, usage=COUNTED),
            DONE,
        ),
        "Hm. So.",
        "Yes",
        family="mistral",
    ),
    Dialect(
        "Azure",
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
        "Azure's filter",
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
    *(
        Dialect(
            f"calls that all have the number 0 and no id, {what}",
            (
                *(chunk(said={"tool_calls": [each]}) for each in found),
                chunk("tool_calls"),
                LAST,
                DONE,
            ),
            calls=expected,
            finish="tool_calls",
        )
        for what, found, expected in (
            (
                "of two tools",
                (
                    function("get_weather", PARIS_JSON, index=0),
                    function("get_time", "{}", index=0),
                ),
                (PARIS, NOW),
            ),
            (
                "of one tool",
                (
                    function("get_weather", PARIS_JSON, index=0),
                    function("get_weather", '{"city": "Rome"}', index=0),
                ),
                (PARIS, ROME),
            ),
        )
    ),
]
