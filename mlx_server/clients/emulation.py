"""Emulates on the client's side what other servers lack: checked answers with retries, a thinking
budget, and tools that are described in the prompt."""

from collections.abc import Callable, Mapping

from mlx_server.clients.exchange import Exchange, Wire, sent
from mlx_server.clients.foreign_answers import (
    ForeignAnswer,
    choices_of,
    completion_of,
    read_choices,
    reading_options,
)
from mlx_server.errors import BadRequest
from mlx_server.families import AS_TEXT
from mlx_server.prompts.message_normalization import OwnText
from mlx_server.prompts.system_text import format_text, tools_text
from mlx_server.reading import as_tool
from mlx_server.repair.allowed import ALL_REPAIRS, RepairPolicy
from mlx_server.repair.answers import Requirements, retry_message
from mlx_server.requests import JsonFormat, NamedTool, ToolChoice
from mlx_server.upstream.limited_thoughts import ThoughtTags
from mlx_server.upstream.messages import as_text, with_system_prompt
from mlx_server.upstream.pieces import read_piece

Ask = Callable[[Wire], Exchange]


def checked_answer(
    body: Wire,
    family: str,
    repair: RepairPolicy = ALL_REPAIRS,
    ask: Ask = sent,
    *,
    tools_in_prompt: bool = False,
) -> Exchange:
    """Requests an answer, repairs it and checks it against the request. An answer that is still
    wrong is requested again with its errors in the conversation, up to `repair.retries` times.

    ask: makes one attempt, which may take several requests.
    """
    options = reading_options(body, family, repair, tools_in_prompt=tools_in_prompt)
    required = requirements(body)
    body = described_in_prompt(body, tools=tools_in_prompt)
    messages, attempts = body["messages"], 0
    while True:
        raw = yield from ask({**body, "messages": messages})
        answers = read_choices(raw, options) or [ForeignAnswer(options, 0)]
        found = answers[0].checked(required)
        if not found.errors or attempts >= repair.retries:
            answers[0].accept(found)
            return completion_of(raw, answers)
        attempts += 1
        rejected = [{"role": "assistant", "content": found.text}] if found.text else []
        again = {"role": "user", "content": retry_message(found.errors).content}
        messages = [*body["messages"], *rejected, again]


def two_passes(body: Wire, tag: str, thinking_tokens: int, family: str) -> Exchange:
    """Limits reasoning to `thinking_tokens` by two requests: the first stops at that limit or at
    the closing tag, the second continues the message with the answer, which may be a tool call.

    The server must be able to continue a message, as vLLM and llama.cpp are, and the model must
    write its reasoning within `<tag>`. The first answer is returned if it is already complete.
    """
    if family in AS_TEXT:
        raise BadRequest(
            f"Models of the family {family} have no tags around their reasoning, so two requests "
            "can't limit it. Leave out `two_pass`, and set `reasoning_effort`."
        )
    tags = ThoughtTags(f"<{tag}>", f"</{tag}>")
    stops = [*_stops(body), tags.closing]
    first = yield {**body, "max_tokens": thinking_tokens, "stop": stops}
    said = read_piece(first)
    has_answer = bool(said.calls) or bool(said.text.strip() and not tags.is_open(said.text))
    if has_answer and said.finish != "length" and said.stop != tags.closing:
        return first
    thoughts = (said.reasoning or said.text).strip().removeprefix(tags.opening).strip()
    begun = {"role": "assistant", "content": tags.begun(thoughts, "")}
    answer = yield {
        **body,
        "messages": [*body["messages"], begun],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    spent = said.usage.completion if said.usage else None
    return _joined(answer, thoughts, spent or 0)


def requirements(body: Wire) -> Requirements:
    """What the request's `response_format` and `tool_choice` require of its answer."""
    return Requirements(_format(body), _tool_choice(body))


def described_in_prompt(body: Wire, *, tools: bool) -> Wire:
    """The body with the schema of its `response_format` in the system prompt too, since many
    servers accept the field and ignore it.

    tools: whether its tools move to the system prompt as well, for servers without tool calling.
    """
    if wanted := _format(body):
        described = {"schema": wanted.schema, "description": wanted.description}
        messages = with_system_prompt(body["messages"], format_text(described))
        body = {**body, "messages": messages}
    return with_hermes_tools(body) if tools else body


def with_hermes_tools(body: Wire) -> Wire:
    """The body for a server without tool calling: the system prompt describes the tools in the
    format of Hermes models, and earlier calls and their results become text."""
    if not (tools := body.get("tools")):
        return body
    rest = {n: v for n, v in body.items() if n not in ("tools", "tool_choice")}
    messages = list(map(as_text, body["messages"]))
    if (choice := _tool_choice(body)) == "none":
        return {**rest, "messages": messages}
    described = tools_text(map(as_tool, tools))
    if isinstance(choice, NamedTool):
        described.append(OwnText(f"\n\nCall the function {choice.name} now."))
    elif choice == "required":
        described.append(OwnText("\n\nCall one of the functions now."))
    return {**rest, "messages": with_system_prompt(messages, described)}


def _joined(answer: Wire, thoughts: str, spent: int) -> Wire:
    """The second request's answer with the first one's reasoning.

    spent: the completion tokens of the first request, which are added to the usage.
    """
    choice = next(iter(choices_of(answer)), {})
    message = {**(choice.get("message") or {}), "reasoning_content": thoughts}
    usage = dict(answer.get("usage") or {})
    for name in ("completion_tokens", "total_tokens"):
        usage[name] = (usage.get(name) or 0) + spent
    details = usage.get("completion_tokens_details") or {}
    usage["completion_tokens_details"] = {**details, "reasoning_tokens": spent}
    return {**answer, "choices": [{**choice, "message": message}], "usage": usage}


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
