"""Detects what a chat template supports by rendering short conversations with it.

Templates of one family differ by version, and users bring their own, so no table could list them.
Each test looks for the words of its conversation in the prompt.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal

from mlx_server.errors import BadRequest
from mlx_server.messages import INSTRUCTION_ROLES, Message
from mlx_server.prompts.message_normalization import (
    REASONING_KEYS,
    Content,
    TemplateCapabilities,
    text_parts,
)
from mlx_server.system.sandbox.chat_template import (
    ChatTemplate,
    RefusedByTemplate,
    TemplateLimitExceeded,
    broken,
)

TOOL_VARIABLES = ("tools", "xml_tools")
"""Variables from which templates render tools."""

TemplateMessage = dict[str, Any]
RenderAttempt = Callable[..., str]
"""Renders messages to a prompt; the prompt is "" if the template refuses them."""

TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"keyq": {"type": "string", "description": "Keyq."}},
    "required": ["keyq"],
}
TOOL_NAME = "toolq"
FUNCTION = {"name": TOOL_NAME, "description": "Toolq.", "parameters": TOOL_PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}

SYSTEM, LATER, USER, ANSWER, RESULT, THOUGHT = "sysq", "latq", "userq", "answq", "resq", "thoq"
NAME = "namq"
VALUES = ("valq1", "valq2")


SPOILT = (f"{{'keyq': '{VALUES[0]}", f'{{\\"keyq\\": \\"{VALUES[0]}')
"""Arguments as the repr of a dict and as JSON within JSON, on which no model was trained. Tools may
be rendered so."""


def template_capabilities(template: ChatTemplate, tokens: dict[str, str]) -> TemplateCapabilities:
    return _detected(template, tuple(sorted(tokens.items())))


@lru_cache(maxsize=64)
def _detected(template: ChatTemplate, tokens: tuple[tuple[str, str], ...]) -> TemplateCapabilities:
    def render(*messages: TemplateMessage, parts: Collection[str] = (), **variables: Any) -> str:
        shaped = with_parts(messages, parts)
        known = {**dict(tokens), "messages": shaped, "add_generation_prompt": True}
        try:
            return template.render({**known, "tools": None, **variables})
        except TemplateLimitExceeded:
            raise
        except BadRequest as error:
            refusals.append(error)
            return ""

    refusals = list[BadRequest]()
    for tools in ([TOOL], None):  # some templates refuse the tools
        parts = _parts(partial(render, tools=tools))
        attempt = partial(render, parts=parts)
        tried = partial(attempt, tools=tools)
        if USER in tried(_message("user", USER)):
            break
    else:  # it needs other input and can't be tested
        for refusal in refusals:
            if isinstance(refusal, RefusedByTemplate) and refusal.lacks:
                raise broken(refusal)
        reads_tools = not template.reads.isdisjoint(TOOL_VARIABLES)
        return TemplateCapabilities(tools="variable" if reads_tools else "never", shows_user=False)
    empties: list[Content] = ["", None, *([text_parts("")] if "assistant" in parts else [])]
    arguments, empty = _call_arguments_shape(tried, empties) or ("never", "")
    has_calls = arguments != "never"

    def calling(values: int = 1, content: Content = empty, **more: Any) -> TemplateMessage:
        calls = [_call(i, arguments, value) for i, value in enumerate(VALUES[:values])]
        return {"role": "assistant", "content": content, "tool_calls": calls, **more}

    first = calling() if has_calls else _message("assistant", ANSWER)
    if _is_part(tried, "tool", parts, RESULT, [_message("user", USER), first, _result()]):
        parts |= {"tool"}
        tried = partial(tried, parts=parts)
    return TemplateCapabilities(
        system=_system(tried, first),
        alternates=not tried(_message("user", USER), _message("user", LATER)),
        calls=_calls(tried, calling) if has_calls else "never",
        text_with_calls=_text_with_calls(tried, calling) if has_calls else "together",
        results=_results(tried, first),
        user_first=has_calls and VALUES[0] not in tried(first, _result(), _message("user", USER)),
        arguments=_arguments(tried, arguments, empty),
        empty_content=empty,
        reasoning=_reasoning(tried, calling),
        tools=_tools(attempt, template),
        schema=_schema(attempt, template),
        names=frozenset(_named_roles(tried)),
        parts=parts,
    )


def _message(role: str, content: Content, **more: Any) -> TemplateMessage:
    return {"role": role, "content": content, **more}


def with_parts(
    messages: Sequence[TemplateMessage], roles: Collection[str]
) -> list[TemplateMessage]:
    """Returns the messages with the texts of these roles as parts."""
    return [
        {**message, "content": text_parts(text)}
        if message["role"] in roles and (text := message.get("content")) and isinstance(text, str)
        else message
        for message in messages
    ]


def _parts(tried: RenderAttempt) -> frozenset[str]:
    """Returns the roles whose texts the template shows only if they are parts."""
    user, answer = _message("user", USER), _message("assistant", ANSWER)
    conversations = {
        "user": (USER, [user]),
        "system": (SYSTEM, [_message("system", SYSTEM), user]),
        "assistant": (ANSWER, [user, answer, user]),
    }
    roles = frozenset[str]()
    for role, (text, messages) in conversations.items():
        if _is_part(tried, role, roles, text, messages):
            roles |= {role}
    return roles


def _is_part(
    tried: RenderAttempt,
    role: str,
    others: frozenset[str],
    text: str,
    messages: Sequence[TemplateMessage],
) -> bool:
    """Whether a role's text is shown only as a part, where texts of the other roles are parts."""
    if text in tried(*messages, parts=others):
        return False
    prompt = tried(*messages, parts=others | {role})
    return text in prompt and not _is_quoted(prompt, text)


def _is_quoted(prompt: str, word: str) -> bool:
    """Whether a word stands in the repr or in the JSON of a part, on which no model was trained."""
    return any(f"{quote}{word}" in prompt for quote in ("'", '"'))


def _call(number: int, arguments: str, value: str) -> TemplateMessage:
    shaped: Any = {"keyq": value} if arguments == "object" else f'{{"keyq": "{value}"}}'
    function = {"name": "toolq", "arguments": shaped}
    return {"id": f"callzq00{number}", "type": "function", "function": function}


def _result(number: int = 0) -> TemplateMessage:
    id = f"callzq00{number}"
    return _message("tool", f"{RESULT}{number}", tool_call_id=id, name="toolq")


def _call_arguments_shape(
    tried: RenderAttempt, empties: Iterable[Content]
) -> tuple[Literal["object", "text"], Content] | None:
    shapes: Iterator[tuple[Literal["object", "text"], Content]] = product(
        ("object", "text"), empties
    )
    for arguments, empty in shapes:
        call = _call(0, arguments, VALUES[0])
        turn = _message("assistant", empty, tool_calls=[call])
        for rest in ((_result(),), ()):
            prompt = tried(_message("user", USER), turn, *rest)
            if VALUES[0] in prompt and not any(each in prompt for each in SPOILT):
                return arguments, empty
    return None


def _arguments(
    tried: RenderAttempt, shape: str, empty: Content
) -> Literal["any", "object", "text"]:
    if shape == "text":
        return "text"
    odd = ({"name": "toolq", "arguments": value} for value in (VALUES[0], [VALUES[0]]))
    calls = ([{"id": "callzq000", "type": "function", "function": function}] for function in odd)
    prompts = (
        tried(_message("user", USER), _message("assistant", empty, tool_calls=call), _result())
        for call in calls
    )
    takes_any = shape == "never" or all(VALUES[0] in prompt for prompt in prompts)
    return "any" if takes_any else "object"


def _system(
    tried: RenderAttempt, call: TemplateMessage
) -> Literal["anywhere", "first", "question", "never"]:
    system, user, end = _message("system", SYSTEM), _message("user", USER), _message("user", "endq")
    later = [user, _message("assistant", ANSWER), _message("system", LATER), end]
    words = (USER, ANSWER, LATER, "endq")
    if _in_order(tried(system, *later), SYSTEM, *words) and _in_order(tried(*later), *words):
        return "anywhere"
    if SYSTEM not in tried(system, user):
        return "never"
    in_a_round = tried(system, user, call, _result()) or tried(system, user, call)
    return "question" if in_a_round and SYSTEM not in in_a_round else "first"


def _in_order(prompt: str, *words: str) -> bool:
    places = [prompt.find(word) for word in words]
    return places[0] >= 0 and places == sorted(places)


def _calls(
    tried: RenderAttempt, calling: Callable[..., TemplateMessage]
) -> Literal["many", "single"]:
    prompt = tried(_message("user", USER), calling(2), _result(0), _result(1))
    return "many" if all(value in prompt for value in VALUES) else "single"


def _text_with_calls(
    tried: RenderAttempt, calling: Callable[..., TemplateMessage]
) -> Literal["together", "split", "never"]:
    user, end = _message("user", USER), _message("assistant", LATER)
    if _in_order(tried(user, calling(content=ANSWER), _result(), end), ANSWER, VALUES[0]):
        return "together"
    split = tried(user, _message("assistant", ANSWER), calling(), _result(), end)
    return "split" if _in_order(split, ANSWER, VALUES[0]) else "never"


def _results(
    tried: RenderAttempt, call: TemplateMessage
) -> Literal["anywhere", "answers", "matched", "never"]:
    user = _message("user", USER)
    if RESULT not in tried(user, call, _result()):
        return "never"
    if RESULT not in tried(user, call, _result(7)):
        return "matched"
    return "anywhere" if RESULT in tried(user, _result(), user) else "answers"


def _reasoning(
    tried: RenderAttempt, calling: Callable[..., TemplateMessage]
) -> Literal["key", "part", "never"]:
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
    prompt = tried(_message("user", USER), {**calling(), "content": parts}, _result())
    keyed = calling(**dict.fromkeys(REASONING_KEYS, THOUGHT))
    if THOUGHT in tried(_message("user", USER), keyed, _result()):
        return "key"
    return "part" if THOUGHT in prompt and not _is_quoted(prompt, THOUGHT) else "never"


def _named_roles(tried: RenderAttempt) -> Iterator[str]:
    user = _message("user", USER)
    conversations = {
        "system": [_message("system", SYSTEM, name=NAME), user],
        "user": [_message("user", USER, name=NAME)],
        "assistant": [user, _message("assistant", ANSWER, name=NAME), user],
    }
    yield from (role for role, messages in conversations.items() if NAME in tried(*messages))


def _tools(
    attempt: RenderAttempt, template: ChatTemplate
) -> Literal["variable", "system", "never"]:
    user = _message("user", USER)
    offered = {variable: [TOOL] for variable in TOOL_VARIABLES if variable in template.reads}
    some_conversations = (
        [user],
        [_message("system", SYSTEM), user],
        [user, _message("assistant", ANSWER), _message("user", LATER)],
    )
    if offered and any(TOOL_NAME in attempt(*each, **offered) for each in some_conversations):
        return "variable"
    in_system = _message("system", SYSTEM, tools=json.dumps([FUNCTION]))
    return "system" if TOOL_NAME in attempt(in_system, user) else "never"


def _schema(
    attempt: RenderAttempt, template: ChatTemplate
) -> Literal["response_format", "json_schema", "never"]:
    """Returns the variable from which the template renders a schema, "never" if there is none."""
    user = _message("user", USER)
    variables: tuple[Literal["response_format", "json_schema"], ...] = (
        "response_format",
        "json_schema",
    )
    for variable in variables:
        if variable in template.reads:
            values = schema_variables(variable, {"schema": TOOL_PARAMETERS, "name": "nameq"})
            if "keyq" in attempt(user, **values):
                return variable
    return "never"


def schema_variables(variable: str, json_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variable in the form that templates read, for a
    `Conversation.response_format`."""
    if variable == "json_schema":
        return {variable: json_schema["schema"]}
    return {variable: {"type": "json_schema", "json_schema": json_schema}}


def default_system(
    template: ChatTemplate, variables: Mapping[str, Any], parts: Collection[str] = ()
) -> str:
    """Returns the system prompt that the template writes for a conversation without one. It may
    depend on the date, so it is not cached."""
    system, user = with_parts([_message("system", SYSTEM), _message("user", USER)], parts)
    try:
        own = template.render({**variables, "messages": [user], "tools": None})
        other = [system, user]
        prompt = template.render({**variables, "messages": other, "tools": None})
    except TemplateLimitExceeded:
        raise
    except BadRequest:
        return ""
    before, _, after = prompt.partition(SYSTEM)
    between, mark, _ = after.partition(USER)
    end = own.find(between + USER, len(before)) if mark and own.startswith(before) else -1
    return own[len(before) : end] if end > 0 else ""


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's words, from the least effort to the most."""


def _by_effort(*values: Any) -> dict[str, Any]:
    return dict(zip(EFFORTS, values, strict=True))


ON = _by_effort(False, *[True] * 6)

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "enable_thinking": ON,
    "thinking": ON,
    "reasoning": ON,
    "thinking_mode": _by_effort("disabled", *["enabled"] * 6),
    "thinking_effort": _by_effort("low", "low", "low", "medium", "high", "max", "max"),
    "thinking_budget": _by_effort(0, 512, 1024, 4096, 16384, -1, -1),
    "low_effort": _by_effort(False, True, True, False, False, False, False),
    "medium_effort": _by_effort(False, False, False, True, False, False, False),
}
"""Variables that a template may read, with their value for each effort."""

WORDS = _by_effort("/no_think", *["/think"] * 6)
"""Words in the system message, for templates that look for them instead of a switch."""

_COMPARED = re.compile(
    r"\breasoning_effort\s*(?:[!=]=\s*(?P<one>'\w+'|\"\w+\")|(?:not\s+)?in\s*[\[(](?P<any>[^\])]*))"
)
"""Matches where a template compares the effort with words."""


def efforts_to_try(effort: object, template: str) -> list[object]:
    """Returns the values to pass to the template, best first: the next ones are for a template that
    refuses the first. A word beyond those that the template knows becomes the nearest one of
    them."""
    if effort not in EFFORTS:
        return [effort]
    rank = EFFORTS.index(effort)
    known = [EFFORTS.index(word) for word in _compared(template)]
    best = rank
    if known and rank > max(known):
        best = max(known)
    elif len(known) > 1 and 0 < rank < min(known):
        best = min(known)
    nearest = sorted(range(1, len(EFFORTS)), key=lambda other: (abs(other - rank), -other))
    return [EFFORTS[i] for i in dict.fromkeys([best, *nearest])]


def _compared(template: str) -> set[str]:
    """Returns the words with an effect of their own. Those that are listed together with "none"
    turn thinking off, so none of them is the nearest of a word that should turn it on."""
    matches = _COMPARED.finditer(template)
    lists = [set(re.findall(r"\w+", each["one"] or each["any"])) for each in matches]
    return set().union(*(words for words in lists if "none" not in words)) & set(EFFORTS)


def switches(kwargs: Mapping[str, Any], takes: Callable[[str], bool]) -> dict[str, Any]:
    effort = kwargs.get("reasoning_effort")
    return {
        name: values[effort]
        for name, values in SWITCHES.items()
        if isinstance(effort, str) and effort in values and takes(name)
    }


def effort_word(kwargs: Mapping[str, Any], template: str) -> str:
    effort = kwargs.get("reasoning_effort")
    has_words = WORDS["none"] in template
    return WORDS.get(effort, "") if has_words and isinstance(effort, str) else ""


def with_effort_word(messages: tuple[Message, ...], word: str) -> tuple[Message, ...]:
    if messages and messages[0].role in INSTRUCTION_ROLES:
        first, rest = messages[0], messages[1:]
        return (replace(first, content=f"{first.content} {word}".lstrip()), *rest)
    return (Message("system", word), *messages)
