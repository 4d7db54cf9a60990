"""Rewrites a conversation so that a chat template can render all of it.

Templates differ in what they refuse, lose or move (see template_capabilities.py). Content that a
template would lose gets another form here, at the same place: none of a client's text is dropped or
moved silently.

Only lines are removed that a client changes with every request and that mean nothing to the model:
they stand at the beginning of a prompt, so that nothing after them would be found in the prompt
cache. Proxies translate the requests of one API for another one, so the system prompt of any
endpoint is searched. Dates, working folders and ids that a tool or an answer may need stay, however
often they change.

Tools and schemas are added to the system prompt for templates that have no place for them. That
text depends on nothing else, and follows the client's own: it is the same in every turn of a
conversation.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal

from mlx_server import limits
from mlx_server.grammars.view import named
from mlx_server.messages import (
    INSTRUCTION_ROLES,
    Conversation,
    Message,
    PicturePart,
    Tool,
    ToolCall,
    content_of,
    pieces_of,
)


@dataclass(frozen=True, slots=True)
class OwnText:
    """Text of the server or the template, in which control tokens are control tokens."""

    text: str


Part = str | OwnText | tuple[ToolCall, ...]
"""Text of a client, text of the server or the template, or calls that the family renders as
text."""

CallId = Callable[[str, str, int], str]
"""Makes the family's id of a call from the client's id, the function's name ("" if the call is
unknown) and the number of earlier calls."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's reasoning; a template reads one of them."""

Content = str | Sequence[Mapping[str, str]] | None
"""The content of a message as templates read it: a text or a list of parts."""

THINK_DELIMITERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def text_parts(text: str) -> Content:
    return [{"type": "text", "text": text}]


@dataclass(frozen=True)
class TemplateCapabilities:
    """The messages that a chat template accepts and renders."""

    system: Literal["anywhere", "first", "question", "never"] = "anywhere"
    """The place where a system turn is rendered; "question": in the latest user turn, and so not at
    all in a tool round."""
    alternates: bool = False
    """Whether two turns of the same role in a row are refused."""
    user_first: bool = False
    calls: Literal["many", "single", "never"] = "many"
    text_with_calls: Literal["together", "split", "never"] = "together"
    """Whether a turn may have text in addition to calls."""
    results: Literal["anywhere", "answers", "matched", "never"] = "anywhere"
    """The places where results are rendered: with "answers" only after calls, with "matched" only
    with the id of one of these calls."""
    arguments: Literal["any", "object", "text"] = "any"
    """The form of a call's arguments that is rendered; with "object" others are lost or refused."""
    empty_content: Content = ""
    """The content of a turn that has only calls."""
    reasoning: Literal["key", "part", "never"] = "never"
    """The place of a turn's reasoning: under a key, or as a part of the content. "never" means that
    it is not rendered, unless a switch of the template changes that."""
    tools: Literal["variable", "system", "never"] = "variable"
    """The source from which tools are rendered: a variable of their own, or a key of the system
    message."""
    schema: Literal["response_format", "json_schema", "never"] = "never"
    """The variable from which the schema of the answer is rendered."""
    names: frozenset[str] = frozenset()
    """The roles of turns whose `name` is rendered; a result has the name of its tool."""
    shows_user: bool = True
    """Whether a user's text is rendered at all, in a sample."""
    parts: frozenset[str] = frozenset()
    """The roles of turns whose text is rendered only from a list of parts."""


RESULT_BEGIN, RESULT_END = OwnText("<tool_response>\n"), OwnText("\n</tool_response>")

MOST_NESTED = limits.JSON_DEPTH // 2
"""How deep arguments of earlier calls are nested at most as objects, which are in messages then."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

EMPTY_TURN = " "
"""Content of an inserted turn, not "" because some templates refuse an empty one."""

MINIMAL = TemplateCapabilities(system="never", alternates=True, calls="never", results="never")
"""The capabilities of every template that knows users and assistants."""


def fallbacks(capabilities: TemplateCapabilities) -> Iterator[TemplateCapabilities]:
    """Ever simpler capabilities, for templates that refuse a conversation for other reasons."""
    yield capabilities
    results: Literal["anywhere", "never"] = (
        "anywhere" if capabilities.results == "anywhere" else "never"
    )
    yield replace(capabilities, calls="never", results=results)
    yield replace(MINIMAL, parts=capabilities.parts)


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def is_empty(self) -> bool:
        return not (any(self.parts) or self.reasoning or self.calls)


def to_turns(
    messages: Iterable[Message],
    roles: Mapping[str, str],
    call_id: CallId,
    delimiters: Sequence[tuple[str, str]] = (),
) -> list[Turn]:
    """Returns messages as turns with the family's roles, ids and names, and with reasoning
    separated from text."""
    turns = (extract_reasoning(_turn(message, roles), delimiters) for message in messages)
    return list(link_calls(turns, call_id))


def think_delimiters(template: str, capabilities: TemplateCapabilities) -> list[tuple[str, str]]:
    """Returns the delimiters between which a client may send reasoning back in the text."""
    thinks = capabilities.reasoning != "never"
    return [(begin, end) for begin, end in THINK_DELIMITERS if thinks or end in template]


def fit_to_template(turns: Sequence[Turn], capabilities: TemplateCapabilities) -> list[Turn]:
    steps: list[tuple[bool, Callable[[Sequence[Turn]], Iterable[Turn]]]] = [
        (capabilities.arguments == "object", odd_calls_to_text),
        (capabilities.calls == "never", partial(map, _turn_calls_to_text)),
        (
            capabilities.results != "anywhere",
            partial(orphan_results_to_text, matched=capabilities.results == "matched"),
        ),
        (capabilities.results == "never", partial(map, _result_to_text)),
        (capabilities.system != "anywhere", system_first),
        (capabilities.system == "question", system_into_question),
        (capabilities.system == "never", system_to_user),
        (capabilities.calls == "single", split_calls),
        (capabilities.user_first, start_with_user),
        (capabilities.alternates, alternate_roles),
        (capabilities.text_with_calls == "split", split_text_from_calls),
    ]
    for needed, step in steps:
        turns = list(step(turns)) if needed else turns
    return list(turns)


def _turn(message: Message, roles: Mapping[str, str]) -> Turn:
    return Turn(
        role=roles.get(message.role, message.role),
        parts=_parts(message),
        reasoning=message.reasoning or "",
        calls=message.tool_calls,
        call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _parts(message: Message) -> tuple[Part, ...]:
    parts = message.parts
    # a rule may have replaced the content since
    shows = any(isinstance(part, PicturePart) for part in parts)
    if shows and content_of(parts) == message.content:
        pieces = pieces_of(parts)
        return tuple(e if isinstance(e, str) else OwnText(e.placeholder) for e in pieces)
    return (message.content,) if message.content else ()


def extract_reasoning(turn: Turn, delimiters: Iterable[tuple[str, str]]) -> Turn:
    """Moves reasoning out of the text. A template that looks for it there would not find it,
    because the guard has marked the delimiters."""
    if turn.role != "assistant" or turn.reasoning or not turn.parts:
        return turn
    text = str(turn.parts[0]).lstrip()
    for begin, end in delimiters:
        at = text.find(end, len(begin)) if text.startswith(begin) else -1
        if at >= 0:
            answer = text[at + len(end) :].lstrip("\n")
            reasoning = text[len(begin) : at].strip("\n")
            return replace(turn, reasoning=reasoning, parts=(answer,) if answer else ())
    return turn


def link_calls(turns: Iterable[Turn], call_id: CallId) -> Iterator[Turn]:
    """Gives calls the family's ids, and results the id and name of the call that they answer."""
    known: dict[str, ToolCall] = {}
    number = 0
    for turn in turns:
        calls = []
        for call in turn.calls:
            id, arguments = call_id(call.id, call.name, number), call.arguments or "{}"
            calls.append(replace(call, id=id, arguments=arguments))
            known[call.id] = calls[-1]
            number += 1
        if turn.role != "tool":
            yield replace(turn, calls=tuple(calls))
        elif answered := known.get(turn.call_id):
            yield replace(turn, call_id=answered.id, name=answered.name)
        else:
            id, name = call_id(turn.call_id, "", number), turn.name or "unknown"
            yield replace(turn, call_id=id, name=name)


def orphan_results_to_text(turns: Iterable[Turn], *, matched: bool = False) -> Iterator[Turn]:
    """Turns results without a preceding call into text, for templates that need the call."""
    ids: set[str] = set()
    for turn in turns:
        if turn.role != "tool":
            ids = {call.id for call in turn.calls}
        yield turn if turn.call_id in ids or (ids and not matched) else _result_to_text(turn)


def _result_to_text(turn: Turn) -> Turn:
    if turn.role != "tool":
        return turn
    return Turn("user", (RESULT_BEGIN, *turn.parts, RESULT_END))


def system_first(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Merges the leading system turns into one; later ones become user turns in their place."""
    begin = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if begin:
        yield _merged(turns[:begin])
    for turn in turns[begin:]:
        yield replace(turn, role="user") if turn.role == "system" else turn


def system_into_question(turns: Sequence[Turn]) -> Iterable[Turn]:
    """Merges the system turn into the last user turn, as the template does outside tool rounds."""
    users = [i for i, turn in enumerate(turns) if turn.role == "user"]
    if not users or turns[0].role != "system":
        return system_to_user(turns)
    last = users[-1]
    question = _merged([replace(turns[0], role="user"), turns[last]])
    return [*turns[1:last], question, *turns[last + 1 :]]


def system_to_user(turns: Sequence[Turn]) -> Sequence[Turn]:
    if not turns or turns[0].role != "system":
        return turns
    first = replace(turns[0], role="user")
    if len(turns) > 1 and turns[1].role == "user":
        return [_merged([first, turns[1]]), *turns[2:]]
    return [first, *turns[1:]]


def split_calls(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Gives each call a turn of its own, followed by its result."""
    places: set[int] = set()
    for i, turn in enumerate(turns):
        if len(turn.calls) < 2:
            if i not in places:
                yield turn
            continue
        answers: dict[str, list[int]] = {}
        results = takewhile(lambda j: turns[j].role == "tool", range(i + 1, len(turns)))
        for j in results:
            answers.setdefault(turns[j].call_id, []).append(j)
        for n, call in enumerate(turn.calls):
            yield replace(turn, calls=(call,)) if n == 0 else Turn(turn.role, calls=(call,))
            for j in answers.pop(call.id, ()):
                places.add(j)
                yield turns[j]


def odd_calls_to_text(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Turns calls whose arguments are not an object into text."""
    for turn in turns:
        is_odd = any(not isinstance(arguments_object(call.arguments), dict) for call in turn.calls)
        yield _turn_calls_to_text(turn) if is_odd else turn


def _turn_calls_to_text(turn: Turn) -> Turn:
    calls: tuple[Part, ...] = (turn.calls,) if turn.calls else ()
    separator: tuple[Part, ...] = ("\n",) if calls and any(turn.parts) else ()
    return replace(turn, parts=turn.parts + separator + calls, calls=())


def arguments_object(arguments: str) -> Any:
    """Returns the arguments of an earlier call as an object, which templates expect. Text that is
    not JSON, or that would take far more memory as an object, or is nested too deeply for a prompt,
    is returned unchanged."""
    opened = arguments.count("[") + arguments.count("{")
    if opened + arguments.count(",") > limits.ARGUMENT_ITEMS:
        return arguments
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:  # an escape can be a lone surrogate
            value = json.loads(LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return arguments
    return arguments if opened > MOST_NESTED and _is_deep(value) else value


def _is_deep(value: Any) -> bool:
    waiting = [(value, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MOST_NESTED:
            return True
        inner = node.values() if isinstance(node, dict) else node
        waiting += ((each, depth + 1) for each in inner if isinstance(each, dict | list))
    return False


def start_with_user(turns: Sequence[Turn]) -> list[Turn]:
    lead = [turn for turn in turns[:1] if turn.role == "system"]
    rest = turns[len(lead) :]
    inserted = [] if rest and rest[0].role == "user" else [Turn("user", (EMPTY_TURN,))]
    return [*lead, *inserted, *rest]


def split_text_from_calls(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Gives text and calls a turn each. Reasoning stays with the calls, since some templates omit
    it elsewhere."""
    for turn in turns:
        if turn.calls and any(turn.parts):
            yield Turn(turn.role, turn.parts)
            yield replace(turn, parts=())
        else:
            yield turn


def alternate_roles(turns: Sequence[Turn]) -> list[Turn]:
    """Makes users and assistants alternate, starting with a user; calls and results don't count."""
    system = [turn for turn in turns[:1] if turn.role == "system"]
    runs: list[list[Turn]] = []
    last_role = "assistant"
    for turn in turns[len(system) :]:
        continues = bool(runs) and runs[-1][-1].role == turn.role and not runs[-1][-1].calls
        if turn.role == "tool" or (turn.calls and not continues):
            runs.append([turn])
        elif continues:
            runs[-1].append(turn)
            last_role = "user" if turn.calls else last_role
        elif not turn.is_empty:
            if turn.role == last_role:
                other = "user" if last_role == "assistant" else "assistant"
                runs.append([Turn(other, (EMPTY_TURN,))])
            runs.append([turn])
            last_role = turn.role
    return [*system, *map(_merged, runs or [[Turn("user", (EMPTY_TURN,))]])]


def _merged(turns: Sequence[Turn]) -> Turn:
    parts: list[Part] = []
    for turn in turns:
        parts += ("\n\n", *turn.parts) if parts and any(turn.parts) else turn.parts
    reasoning = "\n\n".join(turn.reasoning for turn in turns if turn.reasoning)
    return replace(turns[0], parts=tuple(parts), reasoning=reasoning, calls=turns[-1].calls)


END = r"[ \t]*(?:\r?\n|\Z)"


BILLING = "x-anthropic-billing-header"
"""The line that Claude Code and programs on Anthropic's agent SDK send for its billing, most often
as the first: version, entry point, a checksum (`cch`) and the previous request's id."""
BILLING_LINE = re.compile(rf"^{BILLING}:(?>[ \t]*\w+=[^;\s]*(?:;|(?={END})))++{END}", re.M)


def without_volatile_lines(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """Returns the conversation without lines that change with each request, and the lines' names.
    Only the system prompt is searched: the messages before the first one of another role."""
    messages, has_lines = conversation.messages, False
    first = next((i for i, m in enumerate(messages) if m.role not in INSTRUCTION_ROLES), None)
    head: list[Message] = []
    for message in messages[:first]:
        text, count = message.content, 0
        if BILLING in text:
            text, count = BILLING_LINE.subn("", text)
        if text or not count:
            head.append(replace(message, content=text) if count else message)
        has_lines = has_lines or count > 0
    if not has_lines:
        return conversation, ()
    rest = () if first is None else messages[first:]
    return replace(conversation, messages=(*head, *rest)), (BILLING,)


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

BEFORE_TOOLS = OwnText("""\
# Tools

You can call these functions. Each line between <tools> and </tools> describes one:
<tools>
""")

AFTER_TOOLS = OwnText("""
</tools>

To call a function, write its name and its arguments as one JSON object between <tool_call> and \
</tool_call>, and several of these for several calls:
<tool_call>
{"name": "the function", "arguments": {"its parameter": "a value"}}
</tool_call>
What a function returns is given to you between <tool_response> and </tool_response>. Call a \
function where you need what it returns or does; otherwise answer in words.""")

ONE_OF = OwnText("Answer the question correctly, with one of these texts and nothing else: ")
MATCHING = OwnText(
    "Answer the question correctly, with a text that this regular expression matches and nothing "
    "else: "
)

SEPARATOR, COLON = OwnText("\n\n"), OwnText(":\n")


def function_json(tool: Tool) -> dict[str, Any]:
    # templates read these keys without a check that they exist
    absent = {key: value for key, value in NO_PARAMETERS.items() if key not in tool.parameters}
    return {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": {**tool.parameters, **absent},
    }


def tools_text(tools: Iterable[Tool]) -> list[Part]:
    """Describes the tools as Hermes models are given them, and how to call them."""
    lines = (_json({"type": "function", "function": function_json(tool)}) for tool in tools)
    return [BEFORE_TOOLS, "\n".join(lines), AFTER_TOOLS]


def format_text(settings: Mapping[str, Any]) -> list[Part]:
    """Describes a `Conversation.response_format` as an instruction."""
    return _schema_text(settings) if "schema" in settings else list(format_line(settings))


def format_line(settings: Mapping[str, Any]) -> tuple[OwnText, str]:
    """Returns the instruction for an answer that is not JSON, and the format that the client asked
    for."""
    if "choice" in settings:
        return ONE_OF, _json(settings["choice"])
    return MATCHING, settings["regex"]


def _schema_text(settings: Mapping[str, Any]) -> list[Part]:
    schema = settings.get("schema")
    if schema in (True, {}, {"type": "object"}):
        return [OwnText("Answer the question correctly, as a JSON object.")]
    description = settings.get("description")
    about: list[Part] = [OwnText(" ("), description.strip(), OwnText(")")] if description else []
    is_object = isinstance(schema, Mapping) and named(schema) == {"object"}
    form = "a JSON object" if is_object else "JSON"
    begin = OwnText(f"Answer the question correctly, as {form} of this JSON Schema")
    return [begin, *about, COLON, _json(schema)]


def with_system_text(
    turns: Sequence[Turn], added: Sequence[Part], default: Callable[[], str]
) -> list[Turn]:
    """Appends to the leading system turns; `default` makes the text of a missing one."""
    others = (i for i, turn in enumerate(turns) if turn.role not in INSTRUCTION_ROLES)
    leading = next(others, len(turns))
    if leading:
        last = turns[leading - 1]
        separator = [SEPARATOR] if any(last.parts) else []
        extended = replace(last, parts=(*last.parts, *separator, *added))
        return [*turns[: leading - 1], extended, *turns[leading:]]
    text = default()
    before = [OwnText(text), SEPARATOR] if text else []
    return [Turn("system", (*before, *added)), *turns]


def with_question_text(turns: Sequence[Turn], added: Sequence[Part]) -> list[Turn]:
    """Puts the text before the first user's, for templates that move the system turn to the last
    question, where it would be at another place in every prompt."""
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return with_system_text(turns, added, str)
    asked = replace(turns[first], parts=(*added, SEPARATOR, *turns[first].parts))
    return [*turns[:first], asked, *turns[first + 1 :]]


def joined(*texts: Sequence[Part]) -> list[Part]:
    """Joins the texts that are not empty, as one paragraph each."""
    parts: list[Part] = []
    for text in texts:
        parts += [SEPARATOR, *text] if parts and text else text
    return parts


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
