"""A conversation in the shape that a chat template can take.

Templates differ in what they refuse, lose or move (see template_capabilities.py). What they would
lose gets another form here, at the same place: nothing that a client said is dropped or moved
silently.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mlx_server import limits
from mlx_server.messages import Message, ToolCall

Part = str | tuple[ToolCall, ...]
"""A client's text, or calls that the family writes as text."""

CallId = Callable[[str, str, int], str]
"""The id of a call as the family writes it: from the client's, the function's name ("" where no
call is known) and how many calls came before."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""A template reads one of them."""

THINK_DELIMITERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True)
class TemplateCapabilities:
    """What a chat template makes of a conversation."""

    system: Literal["anywhere", "first", "question", "never"] = "anywhere"
    """question: at the last user's turn, or it is lost in a tool round."""
    alternates: bool = False
    """Refuses two turns of the same side in a row."""
    user_first: bool = False
    calls: Literal["many", "single", "never"] = "many"
    text_with_calls: Literal["together", "split", "never"] = "together"
    """Text beside calls in the same turn."""
    results: Literal["anywhere", "answers", "matched", "never"] = "anywhere"
    """answers: only after calls; matched: only by the id of one of these."""
    arguments: Literal["any", "object", "text"] = "any"
    """object: loses or refuses what is none; text: the JSON as it was written."""
    empty_content: str | None = ""
    """The content of a turn that has only calls."""
    reasoning: Literal["key", "part", "never"] = "never"
    """part: of the content; never: not seen, which some switch may change."""


EMPTY_TURN = " "
"""The turn of a side that said nothing; some templates refuse an empty one."""

MINIMAL = TemplateCapabilities(system="never", alternates=True, calls="never", results="never")
"""What any template takes that knows users and assistants."""


def fallbacks(capabilities: TemplateCapabilities) -> Iterator[TemplateCapabilities]:
    """For templates that refuse a conversation for reasons of their own."""
    yield capabilities
    results: Literal["anywhere", "never"] = (
        "anywhere" if capabilities.results == "anywhere" else "never"
    )
    yield replace(capabilities, calls="never", results=results)
    yield MINIMAL


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
    """Before any shaping: roles, ids and names are the family's, reasoning is out of the text."""
    turns = (extract_reasoning(_turn(message, roles), delimiters) for message in messages)
    return list(link_calls(turns, call_id))


def think_delimiters(template: str, capabilities: TemplateCapabilities) -> list[tuple[str, str]]:
    """Those between which a client may send back what the family takes for reasoning."""
    thinks = capabilities.reasoning != "never"
    return [(begin, end) for begin, end in THINK_DELIMITERS if thinks or end in template]


def fit_to_template(turns: Sequence[Turn], capabilities: TemplateCapabilities) -> list[Turn]:
    steps: list[tuple[bool, Callable[[Sequence[Turn]], Iterable[Turn]]]] = [
        (capabilities.arguments == "object", odd_calls_to_text),
        (capabilities.calls == "never", calls_to_text),
        (
            capabilities.results != "anywhere",
            partial(orphan_results_to_text, matched=capabilities.results == "matched"),
        ),
        (capabilities.results == "never", results_to_text),
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
        parts=(message.content,) if message.content else (),
        reasoning=message.reasoning or "",
        calls=message.tool_calls,
        call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def extract_reasoning(turn: Turn, delimiters: Iterable[tuple[str, str]]) -> Turn:
    """Reasoning that a client sends back as text, where a template would look for it itself: it
    could not see the marks of a text that is sealed."""
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
    """Calls get the family's ids; results the id and the name of the call that they answer."""
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
    """Results of no call before them, where the template has no place for these."""
    ids: set[str] = set()
    for turn in turns:
        if turn.role != "tool":
            ids = {call.id for call in turn.calls}
        yield turn if turn.call_id in ids or (ids and not matched) else _result_to_text(turn)


def results_to_text(turns: Sequence[Turn]) -> Iterator[Turn]:
    return map(_result_to_text, turns)


def _result_to_text(turn: Turn) -> Turn:
    if turn.role != "tool":
        return turn
    text = "".join(map(str, turn.parts))
    return Turn("user", (f"<tool_response>\n{text}\n</tool_response>",))


def system_first(turns: Sequence[Turn]) -> Iterator[Turn]:
    """What the system says first is one turn; what it says later, a user says at that place."""
    begin = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if begin:
        yield _merged(turns[:begin])
    for turn in turns[begin:]:
        yield replace(turn, role="user") if turn.role == "system" else turn


def system_into_question(turns: Sequence[Turn]) -> Iterable[Turn]:
    """The system's turn with the last user's, as the template itself has it outside of calls."""
    asked = [i for i, turn in enumerate(turns) if turn.role == "user"]
    if not asked or turns[0].role != "system":
        return system_to_user(turns)
    last = asked[-1]
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
    """Each call with its result behind it, in a turn of its own."""
    taken: set[int] = set()
    for i, turn in enumerate(turns):
        if len(turn.calls) < 2:
            if i not in taken:
                yield turn
            continue
        answers: dict[str, list[int]] = {}
        for j in range(i + 1, next(_end_of_results(turns, i + 1))):
            answers.setdefault(turns[j].call_id, []).append(j)
        for n, call in enumerate(turn.calls):
            yield replace(turn, calls=(call,)) if n == 0 else Turn(turn.role, calls=(call,))
            for j in answers.pop(call.id, ()):
                taken.add(j)
                yield turns[j]


def _end_of_results(turns: Sequence[Turn], begin: int) -> Iterator[int]:
    yield from (i for i in range(begin, len(turns)) if turns[i].role != "tool")
    yield len(turns)


def calls_to_text(turns: Sequence[Turn]) -> Iterator[Turn]:
    return map(_turn_calls_to_text, turns)


def odd_calls_to_text(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Those whose arguments are no object, where the template can't tell them."""
    for turn in turns:
        is_odd = any(not isinstance(arguments_object(call.arguments), dict) for call in turn.calls)
        yield _turn_calls_to_text(turn) if is_odd else turn


def _turn_calls_to_text(turn: Turn) -> Turn:
    written: tuple[Part, ...] = (turn.calls,) if turn.calls else ()
    gap: tuple[Part, ...] = ("\n",) if written and any(turn.parts) else ()
    return replace(turn, parts=turn.parts + gap + written, calls=())


def arguments_object(arguments: str) -> Any:
    """Templates want the arguments of earlier calls as an object; what is none stays text, and so
    does what would be far larger as one."""
    if sum(map(arguments.count, ",[{")) > limits.ARGUMENT_ITEMS.value:
        return arguments
    try:
        found = json.loads(arguments)
        if "\\u" in arguments:  # an escape can hide half a character
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return found


def start_with_user(turns: Sequence[Turn]) -> list[Turn]:
    lead = [turn for turn in turns[:1] if turn.role == "system"]
    rest = turns[len(lead) :]
    silent = [] if rest and rest[0].role == "user" else [Turn("user", (EMPTY_TURN,))]
    return [*lead, *silent, *rest]


def split_text_from_calls(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Reasoning stays with the calls: some templates leave it out anywhere else."""
    for turn in turns:
        if turn.calls and any(turn.parts):
            yield Turn(turn.role, turn.parts)
            yield replace(turn, parts=())
        else:
            yield turn


def alternate_roles(turns: Sequence[Turn]) -> list[Turn]:
    """Users and assistants by turns, a user first; calls and their results are not counted."""
    system = [turn for turn in turns[:1] if turn.role == "system"]
    runs: list[list[Turn]] = []
    spoke = "assistant"
    for turn in turns[len(system) :]:
        goes_on = bool(runs) and runs[-1][-1].role == turn.role and not runs[-1][-1].calls
        if turn.role == "tool" or (turn.calls and not goes_on):
            runs.append([turn])
        elif goes_on:
            runs[-1].append(turn)
            spoke = "user" if turn.calls else spoke
        elif not turn.is_empty:
            if turn.role == spoke:
                runs.append([Turn(_other_role(spoke), (EMPTY_TURN,))])
            runs.append([turn])
            spoke = turn.role
    return [*system, *map(_merged, runs or [[Turn("user", (EMPTY_TURN,))]])]


def _other_role(role: str) -> str:
    return "user" if role == "assistant" else "assistant"


def _merged(turns: Sequence[Turn]) -> Turn:
    parts: list[Part] = []
    for turn in turns:
        parts += ("\n\n", *turn.parts) if parts and any(turn.parts) else turn.parts
    reasoning = "\n\n".join(turn.reasoning for turn in turns if turn.reasoning)
    return replace(turns[0], parts=tuple(parts), reasoning=reasoning, calls=turns[-1].calls)
