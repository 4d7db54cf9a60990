"""What other servers can't do by themselves: checks, retries, a thinking budget, Hermes' tools."""

from collections.abc import Callable, Mapping, Sequence

from mlx_server.clients.exchange import Exchange, Wire, sent
from mlx_server.clients.foreign_answers import read_completion, thoughts_of
from mlx_server.errors import BadRequest
from mlx_server.events import FinishReason
from mlx_server.messages import ToolCall
from mlx_server.prompts.history_rendering import in_hermes_tags
from mlx_server.prompts.message_normalization import RESULT_BEGIN, RESULT_END, OwnText, Part
from mlx_server.prompts.system_text import format_text, tools_text
from mlx_server.reading import AS_TEXT, as_tool
from mlx_server.repair.allowed import ALL_REPAIRS, RepairPolicy
from mlx_server.repair.answers import RawAnswer, Requirements, check_answer, retry_message
from mlx_server.requests import JsonFormat, NamedTool, ToolChoice

Ask = Callable[[Wire], Exchange]

EMPTY = ("content: there is no answer",)


def checked_answer(
    body: Wire, family: str, repair: RepairPolicy = ALL_REPAIRS, ask: Ask = sent
) -> Exchange:
    """An answer that is read, checked against what the request requires, and asked for again with
    what is wrong with it, as often as `repair.retries` says. ask: how one attempt is made."""
    body = with_format_told(body)
    messages = list(body["messages"])
    answer: Wire = {}
    for attempt in range(repair.retries + 1):
        tools = body.get("tools") or ()
        raw = yield from ask({**body, "messages": messages})
        answer = read_completion(raw, family, tools, repair)
        errors = _check(answer, body, repair)
        if not errors:
            return answer
        if attempt < repair.retries:
            said = answer["choices"][0]["message"]["content"] or ""
            again = {"role": "user", "content": retry_message(errors).content}
            rejected = [{"role": "assistant", "content": said}] if said else []
            messages = [*body["messages"], *rejected, again]
        else:
            _report(answer, "unmet", [{"index": 0, "what": error} for error in errors])
    return answer


def two_passes(body: Wire, tag: str, thinking_tokens: int, family: str) -> Exchange:
    """Thoughts of at most so many tokens, then the answer after them, which may be a call.

    It is for servers that continue a message, as vLLM and llama.cpp do, and for models that think
    within tags.
    """
    if family in AS_TEXT:
        raise BadRequest(
            f"A model of the family {family} thinks in no tags, so that its thoughts can't be "
            "limited by two requests. Leave out `two_pass` and set `reasoning_effort`."
        )
    opening, closing = f"<{tag}>", f"</{tag}>"
    stops = [*_stops(body), closing]
    first = yield {**body, "max_tokens": thinking_tokens, "stop": stops}
    choice = _choice(first)
    is_open = choice.get("finish_reason") == "length" or choice.get("stop_reason") == closing
    if not is_open:  # it answered within the budget, or without thoughts
        return first
    message = choice.get("message") or {}
    thoughts = thoughts_of(message) or str(message.get("content") or "")
    thoughts = thoughts.strip().removeprefix(opening).strip()
    begun = {"role": "assistant", "content": f"{opening}\n{thoughts}\n{closing}\n\n"}
    answer = yield {
        **body,
        "messages": [*body["messages"], begun],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    return _joined(answer, first, thoughts)


def with_hermes_tools(body: Wire) -> Wire:
    """The body for a server that has no tools: they are described in the system prompt, as Hermes
    models are given them, and earlier calls and their results are text."""
    if not (tools := body.get("tools")):
        return body
    rest = {n: v for n, v in body.items() if n not in ("tools", "tool_choice")}
    messages = [_as_text(message) for message in body["messages"]]
    if body.get("tool_choice") == "none":
        return {**rest, "messages": messages}
    told = _plain(tools_text(map(as_tool, tools)))
    if isinstance(choice := _tool_choice(body), NamedTool):
        told += f"\n\nCall the function {choice.name} now."
    elif choice == "required":
        told += "\n\nCall one of the functions now."
    return {**rest, "messages": _with_system_text(messages, told)}


def with_format_told(body: Wire) -> Wire:
    """The body with the schema of its answer in the system prompt, since servers ignore it."""
    if (wanted := _format(body)) is None:
        return body
    described = {"schema": wanted.schema, "description": wanted.description}
    told = _plain(format_text(described))
    return {**body, "messages": _with_system_text(body["messages"], told)}


def _check(answer: Wire, body: Wire, repair: RepairPolicy) -> Sequence[str]:
    """What is wrong with the first answer. Repairs of its text are made in it."""
    choice = _choice(answer)
    message = choice.get("message") or {}
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    reason: FinishReason = choice.get("finish_reason") or "stop"
    required = Requirements(_format(body), _tool_choice(body))
    raw = RawAnswer(text, thoughts_of(message), len(calls), reason)
    found = check_answer(raw, required, repair)
    if found.text != text:
        message["content"] = found.text
    repairs = [{"index": 0, "what": what, "where": where} for what, where in found.repairs]
    _report(answer, "repairs", repairs)
    if not (found.text.strip() or calls or reason == "length"):
        return found.errors or EMPTY
    return found.errors


def _report(answer: Wire, name: str, found: Sequence[Wire]) -> None:
    if found:
        reported = answer.setdefault("mlx_server", {"repairs": [], "unenforced": []})
        reported[name] = [*reported.get(name, ()), *found]


def _joined(answer: Wire, first: Wire, thoughts: str) -> Wire:
    """The answer of the second request with the thoughts of the first, and the usage of both."""
    choice = _choice(answer)
    message = {**(choice.get("message") or {}), "reasoning_content": thoughts}
    usage = dict(answer.get("usage") or {})
    before = (first.get("usage") or {}).get("completion_tokens") or 0
    for name in ("completion_tokens", "total_tokens"):
        usage[name] = (usage.get(name) or 0) + before
    details = usage.get("completion_tokens_details") or {}
    usage["completion_tokens_details"] = {**details, "reasoning_tokens": before}
    return {**answer, "choices": [{**choice, "message": message}], "usage": usage}


def _choice(answer: Wire) -> Wire:
    choices = answer.get("choices")
    found = choices[0] if isinstance(choices, list) and choices else {}
    return found if isinstance(found, dict) else {}


def _stops(body: Wire) -> list[str]:
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else list(stop or ())


def _format(body: Wire) -> JsonFormat | None:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_object":
        return JsonFormat()
    described = wanted.get("json_schema") if wanted.get("type") == "json_schema" else None
    if not isinstance(described, Mapping):
        return None
    schema = described.get("schema", {"type": "object"})
    return JsonFormat(schema, description=described.get("description"))


def _tool_choice(body: Wire) -> ToolChoice:
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        function = choice.get("function") or choice
        return NamedTool(str(function.get("name")))
    named: dict[str, ToolChoice] = {"none": "none", "required": "required"}
    return named.get(str(choice), "auto")


def _as_text(message: Wire) -> Wire:
    if message["role"] == "tool":
        content = f"{RESULT_BEGIN.text}{message['content']}{RESULT_END.text}"
        return {"role": "user", "content": content}
    if not (calls := message.get("tool_calls")):
        return message
    functions = [(call.get("id") or "", call["function"]) for call in calls]
    made = [ToolCall(id, each["name"], each["arguments"]) for id, each in functions]
    written = in_hermes_tags(made, lambda text: text)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message.get("content"), written)))}


def _with_system_text(messages: Sequence[Wire], added: str) -> list[Wire]:
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{added}"}, *messages[1:]]
    return [{"role": "system", "content": added}, *messages]


def _plain(parts: Sequence[Part]) -> str:
    texts = (part.text if isinstance(part, OwnText) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
