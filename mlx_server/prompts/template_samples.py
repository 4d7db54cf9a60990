"""What a chat template writes for an assistant's calls and reasoning, found by rendering some.

The model was trained to write the same, so a family can be recognized by reading it back.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_server.errors import BadRequest
from mlx_server.messages import Tool
from mlx_server.prompts.message_normalization import REASONING_KEYS, Content, TemplateCapabilities
from mlx_server.prompts.template_capabilities import (
    ANSWER,
    RESULT,
    THOUGHT,
    USER,
    TemplateMessage,
    template_capabilities,
    with_parts,
)
from mlx_server.sandbox.chat_template import ChatTemplate, TemplateLimitExceeded

KEYS = ("keyq", "lastq")
SAMPLED_TOOLS = tuple(
    Tool(
        name,
        f"{name}.",
        {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}},
    )
    for name in ("toolq", "workq")
)

Call = tuple[str, dict[str, str]]

CALLS: tuple[Call, ...] = (
    ("toolq", {"keyq": "valq1", "lastq": "valq2"}),
    ("workq", {"keyq": "valq3", "lastq": "valq4"}),
)

PLAIN_ID, NAMED_ID = "callzq00{number}", "functions.{name}:{number}"

SIDES = re.compile(r"begin|start|open|prefix|end|close|suffix|[^a-z]")
"""Matches the part in which an opening delimiter differs from its closing one."""

OPENING = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*\Z")
CLOSING = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]]+\])")


@dataclass(frozen=True)
class CallSample:
    written: str
    """The text of the turn, without what ends the turn."""
    calls: tuple[Call, ...]
    is_whole: bool = True
    """Whether `written` ends with the turn; else it ends where a result of the call begins."""


@dataclass(frozen=True)
class TemplateSamples:
    calls: tuple[CallSample, ...] = ()
    """A turn with one call, and one with two where the template renders several."""
    named: tuple[CallSample, ...] = ()
    """The same turns with ids that contain the name, as some models write nothing but the id."""
    thoughts: tuple[str, str] | None = None
    """The delimiters around a turn's reasoning."""


def template_samples(template: ChatTemplate, tokens: dict[str, str]) -> TemplateSamples:
    """Returns no samples of a template that takes too long: a request can report that better."""
    try:
        return _sampled(template, tuple(sorted(tokens.items())))
    except TemplateLimitExceeded:
        return TemplateSamples()


@lru_cache(maxsize=64)
def _sampled(template: ChatTemplate, tokens: tuple[tuple[str, str], ...]) -> TemplateSamples:
    capabilities = template_capabilities(template, dict(tokens))
    return _Sampling(template, dict(tokens), capabilities).samples()


@dataclass(frozen=True)
class _Sampling:
    template: ChatTemplate
    tokens: dict[str, str]
    capabilities: TemplateCapabilities

    def samples(self) -> TemplateSamples:
        capabilities = self.capabilities
        if capabilities.calls == "never":
            return TemplateSamples(thoughts=self._thoughts())
        shape = "text" if capabilities.arguments == "text" else "object"
        counts = (1, 2) if capabilities.calls == "many" else (1,)
        sampled = [
            [self._calls(CALLS[:n], shape, capabilities.empty_content, id) for n in counts]
            for id in (PLAIN_ID, NAMED_ID)
        ]
        plain, named = (tuple(filter(None, found)) for found in sampled)
        return TemplateSamples(plain, () if named == plain else named, self._thoughts())

    def _rendered(self, *messages: TemplateMessage) -> str:
        """Returns the prompt; empty if the template refuses the messages."""
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": {**tool.parameters, "required": list(KEYS)},
                },
            }
            for tool in SAMPLED_TOOLS
        ]
        given = with_parts(messages, self.capabilities.parts)
        variables = {**self.tokens, "messages": given, "tools": tools}
        try:
            return self.template.render({**variables, "add_generation_prompt": False})
        except TemplateLimitExceeded:
            raise
        except BadRequest:
            return ""

    def _calls(
        self, calls: Sequence[Call], shape: str, content: Content, id: str
    ) -> CallSample | None:
        user = {"role": "user", "content": USER}
        turn = {"role": "assistant", "content": content, "tool_calls": _made(calls, shape, id)}
        answered = self._rendered(user, {"role": "assistant", "content": ANSWER})
        prompt = self._rendered(user, turn)
        if not answered:
            return None
        if _shows(prompt, calls):
            return CallSample(_without_end(_turn(prompt, answered), answered), tuple(calls))
        prompt = self._rendered(user, turn, *_results(calls, id))
        if not _shows(prompt, calls):
            return None
        written = _turn(prompt, answered)
        return CallSample(written[: written.find(RESULT)], tuple(calls), is_whole=False)

    def _thoughts(self) -> tuple[str, str] | None:
        keyed = dict.fromkeys(REASONING_KEYS, THOUGHT)
        turn = {"role": "assistant", "content": ANSWER, **keyed}
        before, thought, after = self._rendered({"role": "user", "content": USER}, turn).partition(
            THOUGHT
        )
        opening, closing = OPENING.search(before), CLOSING.match(after)
        if not (thought and opening and closing):
            return None
        pair = opening[1], closing[1]
        named = {SIDES.sub("", mark.lower()) for mark in pair}
        return pair if len(named) == 1 and pair[0] != pair[1] else None


def common_beginning(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    differs = (at for at, (left, right) in pairs if left != right)
    return one[: next(differs, min(len(one), len(other)))]


def whole_delimiters(text: str) -> str:
    """Returns the text without the beginning of a delimiter at its end."""
    begun = text.rfind("<")
    return text[:begun] if begun > text.rfind(">") else text


def _made(calls: Sequence[Call], shape: str, id: str) -> list[dict[str, Any]]:
    def arguments(given: dict[str, str]) -> Any:
        return json.dumps(given) if shape == "text" else given

    return [
        {
            "id": id.format(name=name, number=number),
            "type": "function",
            "function": {"name": name, "arguments": arguments(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]


def _results(calls: Sequence[Call], id: str) -> list[TemplateMessage]:
    return [
        {
            "role": "tool",
            "content": RESULT,
            "tool_call_id": id.format(name=name, number=number),
            "name": name,
        }
        for number, (name, _) in enumerate(calls)
    ]


def _shows(prompt: str, calls: Sequence[Call]) -> bool:
    if "'arguments': " in prompt:  # the repr of a call, which no model was trained on
        return False
    return all(value in prompt for _, given in calls for value in given.values())


def _turn(prompt: str, answered: str) -> str:
    """Returns the part of the prompt from where it differs from `answered`, which has a turn of
    nothing but text instead."""
    return prompt[len(whole_delimiters(common_beginning(prompt, answered))) :]


def _without_end(written: str, answered: str) -> str:
    end = common_beginning(written[::-1], answered[::-1])[::-1]
    before = written[: len(written) - len(end)]
    if before and before[-1] not in "})]>\n`":  # this is only the end of a longer delimiter
        begins = [at for at in map(end.find, "<[\n") if at >= 0]
        end = end[min(begins) :] if begins else ""
    return written[: len(written) - len(end)] if end else written
