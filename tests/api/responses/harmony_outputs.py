"""What gpt-oss writes, and calls that it makes."""

from tests.api.responses_schema import Json

PATH = "/v1/responses"
OTHER = "other"
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look it up."
FINAL = "<|channel|>final<|message|>It is so."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def built_in(tool: str, text: str, channel: str = "analysis") -> str:
    return f"<|channel|>{channel} to={tool} code<|message|>{text}"


SEARCH = built_in("browser.search", '{"query": "cats", "topn": 3}')
PYTHON = built_in("python", "print(1)\n")
CUT = frozenset(
    {
        *("reasoning, cut", "preamble, cut", "final, cut", "search, cut", "code, cut"),
        *("call, cut", "whole call, cut"),
    }
)


OUTPUTS = {
    "final": FINAL,
    "final again": FINAL + NEXT + FINAL,
    "all of it": THOUGHT + PREAMBLE + NEXT + FINAL,
    "two preambles": PREAMBLE + NEXT + THOUGHT + PREAMBLE + NEXT + FINAL,
    "two thoughts": THOUGHT + THOUGHT + FINAL,
    "call": THOUGHT + PREAMBLE + NEXT + CALL + "<|call|>",
    "no header": "It is so, and I go on for a while.",
    "no channel": "<|message|>It is so.",
    "unknown tool": PREAMBLE + NEXT + CALL.replace("functions.f", "functions.g"),
    "reasoning, cut": "<|channel|>analysis<|message|>Hm",
    "preamble, cut": THOUGHT + PREAMBLE,
    "final, cut": THOUGHT + PREAMBLE + NEXT + FINAL,
    "call, cut": THOUGHT + CALL.removesuffix("}"),
    "whole call, cut": THOUGHT + CALL,
    "search": THOUGHT + SEARCH + NEXT + FINAL,
    "search, cut": built_in("browser.search", '{"query": "ca'),
    "only a search": THOUGHT + SEARCH,
    "search, then thought": SEARCH + NEXT + "<|channel|>analysis<|message|>Hm.",
    "open": built_in("browser.open", '{"id": "https://example.com", "cursor": 1}') + NEXT + FINAL,
    "open a link": built_in("browser.open", '{"id": 3}') + NEXT + FINAL,
    "open again": built_in("browser.open", "") + NEXT + FINAL,
    "find": built_in("browser.find", '{"pattern": "cat", "cursor": 0}') + NEXT + FINAL,
    "half a character": built_in("browser.search", r'{"query": "\ud800"}') + NEXT + FINAL,
    "no JSON": built_in("browser.search", "cats!") + NEXT + FINAL,
    "no object": built_in("browser.search", "[1]") + NEXT + FINAL,
    "no such tool": built_in("browser.click", "{}") + NEXT + FINAL,
    "nothing at all": built_in("python", "") + NEXT + FINAL,
    "code": THOUGHT + PYTHON + NEXT + FINAL,
    "code, cut": PYTHON,
    "container": built_in("container.exec", '{"cmd": ["ls"]}', "commentary") + NEXT + FINAL,
}


SECOND_STEP = "call"
"""What is played once more, for the results of its call."""


FUNCTION: Json = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
