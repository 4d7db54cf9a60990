"""Slips in well-formed calls: no argument is cut short, no text is lost, no call is taken back."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mlx_server.events import Event
from mlx_server.families import family_named
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext
from tests.families.goldens import NO_TOKEN, Reads, folded, goldens_of, tools
from tests.tables import cases

BASH = Tool(
    "bash",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
)


def read(
    family: str,
    output: str,
    size: int = 10_000,
    *,
    offered: Sequence[Tool] = (BASH,),
    cut: bool = False,
    holds_calls: bool = False,
) -> Reads:
    context = ParseContext(tools=tuple(offered), holds_calls=holds_calls)
    parser = family_named(family).make_parser(context)
    pieces = [output[at : at + size] for at in range(0, len(output), size)]
    events: list[Event] = [event for text in pieces for event in parser.feed(NO_TOKEN, text)]
    return folded([*events, *parser.finish(cut=cut)], offered)


def hermes(quote: str, text: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{text}"}}}}\n</tool_call>'


def llama(quote: str, text: str) -> str:
    return f'{{"name": "bash", "parameters": {{"command": "{text}"}}}}'


def mistral(quote: str, text: str) -> str:
    return f'[TOOL_CALLS]bash[ARGS]{{"command": "{text}"}}'


def kimi(quote: str, text: str) -> str:
    return (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        f'<|tool_call_argument_begin|>{{"command": "{text}"}}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def lfm2(quote: str, text: str) -> str:
    return f"<|tool_call_start|>[bash(command={quote}{text}{quote})]<|tool_call_end|>"


def olmo3(quote: str, text: str) -> str:
    return f"<function_calls>bash(command={quote}{text}{quote}, timeout=3)</function_calls>"


def gemma4(quote: str, text: str) -> str:
    return f"<|tool_call>call:bash{{command:{quote}{text}{quote}}}<tool_call|>"


WRITERS: dict[str, Callable[[str, str], str]] = {
    "qwen3": hermes,
    "llama3": llama,
    "mistral": mistral,
    "kimi_k2": kimi,
    "lfm2": lfm2,
    "olmo3": olmo3,
    "gemma4": gemma4,
}


pytestmark = pytest.mark.slow


LINES = st.text(st.sampled_from("ab \n<é"), min_size=1, max_size=8)


@pytest.mark.parametrize("family", ["seed_oss", "minimax_m2"])
@given(text=LINES, size=st.integers(1, 9))
def test_nothing_but_the_line_breaks_around_one_line_is_dropped(
    family: str, text: str, size: int
) -> None:
    form = {
        "seed_oss": "<seed:tool_call><function=bash><parameter=command>{}</parameter></function>"
        "</seed:tool_call>",
        "minimax_m2": '<minimax:tool_call><invoke name="bash"><parameter name="command">{}'
        "</parameter></invoke></minimax:tool_call>",
    }[family]
    found = read(family, form.format(text), size)
    (call,) = found.calls
    line = text[1:-1]
    is_one_line = bool(line) and "\n" not in line and text == f"\n{line}\n"
    assert call.arguments == {"command": line if is_one_line else text}
    assert found.repairs == (["format tool_calls[0]"] if is_one_line else [])


ECHO = Tool("echo", parameters={"type": "object", "properties": {"command": {"type": "string"}}})


@pytest.mark.parametrize(
    ("id", "arguments", "offered", "meant"),
    [
        ("0", '{"command": "ls"}', (BASH,), "bash"),
        ("12", '{"command": "ls", "timeout": 3}', (BASH, ECHO), "bash"),
        ("functions:0", '{"command": "ls"}', (BASH,), "bash"),
        ("0", '{"command": "ls"}', (BASH, ECHO), None),
        ("0", '{"command": "ls", "timeout": "soon"}', (BASH,), None),
        ("0", '{"timeout": 3}', (BASH,), None),
        ("0", "{}", (ECHO,), None),
        ("0", '["ls"]', (BASH,), None),
        ("0", '{"command": "ls"', (BASH,), None),
        ("0", "[" * 2000, (BASH,), None),
    ],
)
def test_a_number_for_an_id_means_the_one_tool_that_takes_the_arguments(
    id: str, arguments: str, offered: Sequence[Tool], meant: str | None
) -> None:
    begin = f"<|tool_calls_section_begin|><|tool_call_begin|>{id}<|tool_call_argument_begin|>"
    output = f"{begin}{arguments}<|tool_call_end|><|tool_calls_section_end|>"
    for size in (1, 3, len(output)):
        found = read("kimi_k2", output, size, offered=offered)
        assert [call.name for call in found.calls] == ([meant] if meant else [])
        assert found.text == ("" if meant else output)
        assert found.repairs == (["name tool_calls[0].function.name"] if meant else [])


@given(text=st.text(st.sampled_from(" ,='\"\\abn1"), max_size=12), size=st.integers(1, 9))
def test_what_is_assigned_to_glms_arguments_is_all_that_was_written(text: str, size: int) -> None:
    output = f"<tool_call>bash command={text}</tool_call>"
    found = read("glm4_5", output, size)
    for call in found.calls:
        value = call.arguments["command"]
        assert text.strip().rstrip(",") in (value, f"'{value}'", f'"{value}"')
    assert found.calls or found.text == output


FAMILIES = [
    *("qwen3", "qwen3_coder", "glm4_5", "kimi_k2", "minimax_m2", "gemma4", "deepseek_v3", "lfm2"),
    *("seed_oss", "deepseek_v32", "mistral", "olmo3", "hermes", "llama3", "nemotron", "command"),
]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_call_with_something_missing_or_doubled(family: str, data: st.DataObject) -> None:
    """It is the same call, or text with every character of it, and is never taken back.

    In a line of prose it is text if no grammar holds the model to its calls."""
    cases = [case for case in goldens_of(family_named(family)) if case.reads.calls and case.by_text]
    case = data.draw(st.sampled_from(cases))
    output = case.prompt_end + case.output
    begin = data.draw(st.integers(0, len(output)))
    end = data.draw(st.integers(begin, min(len(output), begin + 20)))
    broken = data.draw(
        st.sampled_from(
            [output[:begin] + output[end:], output[:end] + output[begin:end] + output[end:]]
        )
    )
    found = read(family, broken, offered=tools())
    held = read(family, broken, 3, offered=tools(), holds_calls=True)
    assert not held.unfinished
    made = [call.arguments for call in found.calls]
    assert all(call.arguments in made for call in held.calls)
    if len(held.calls) == len(made):
        assert (held.text, held.reasoning) == (found.text, found.reasoning)
    else:
        assert len(held.text + held.reasoning) > len(found.text + found.reasoning)
    marked = [what for what in found.unmet if what.endswith("is text")]
    assert len(marked) == len(found.unfinished), "a call that was begun and is text is reported"
    if not (found.calls or found.reasoning):
        assert _letters(found.text) >= _letters(case.output) - _letters(output[begin:end])


def _letters(text: str) -> set[str]:
    return {letter for letter in text if not letter.isascii()}


@pytest.mark.parametrize("holds_calls", [False, True])
def test_a_bare_call_that_breaks_is_text_and_no_other_call(holds_calls: bool) -> None:
    output = '{"name": "get_weather", "parameters": {"city": "unit": "c"}}'
    found = read("llama3", output, offered=tools(), holds_calls=holds_calls)
    assert (found.calls, found.text) == ([], output)


def test_a_broken_call_that_was_begun_is_reported_and_never_whole() -> None:
    output = hermes('"', 'echo "hi"')
    found = read("qwen3", output)
    assert found.unfinished == ["bash"]
    assert found.unmet == [
        "tool_calls[0]: the arguments of bash are malformed, so the call is text"
    ]
    assert found.text == output
    held = read("qwen3", output, holds_calls=True)
    assert (held.unfinished, held.unmet, held.text) == ([], [], output)


PIECES = (
    "'",
    '"',
    "'",
    '"',
    " ",
    "a",
    "it's",
    ",",
    ", b",
    "=",
    ")",
    "(",
    "]",
    "}",
    "{",
    ":",
    "-c",
    "call:",
)
commands = st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join)


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", WRITERS)
def test_a_command_with_quotes_in_it_is_whole_or_no_call(family: str, examples: int) -> None:
    """Models and templates forget to escape: what is run must be all that was written."""

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(text=commands, quote=st.sampled_from("'\""), size=st.integers(1, 7), cut=st.booleans())
    def any_command(text: str, quote: str, size: int, cut: bool) -> None:
        # which opens a string of Python's that is closed there
        assume(not text.startswith(quote * 2))
        check(family, text, quote, size, cut=cut)

    any_command()


def check(family: str, text: str, quote: str, size: int, *, cut: bool) -> None:
    output = WRITERS[family](quote, text)
    found = read(family, output, size)
    for call in found.calls:
        assert call.arguments["command"] == text, output
    if not found.calls:
        assert output.startswith(found.text), "but for delimiters that nothing has opened"
        assert text in found.text
    begin = output.index("command")
    for end in range(begin, output.index(text, begin) + len(text)):
        if not {"'", '"'} & set(text):
            assert not read(family, output[:end], size, cut=cut).calls, output[:end]


@cases
def test_what_can_end_in_one_place_only_is_a_call(family: str, text: str) -> None:
    (call,) = read(family, WRITERS[family]("'", text)).calls
    assert call.arguments["command"] == text


@pytest.mark.parametrize("text", ['"}]', '"} ]', '"}], "a'])
def test_a_bracket_in_a_string_that_was_not_escaped_ends_no_call(text: str) -> None:
    """Though it looks like the end of an array whose last call lacks a brace."""
    assert not read("qwen3", WRITERS["qwen3"]("'", text)).calls


@pytest.mark.parametrize("text", ["echo 'a", "echo 'a' 'b", "don' run"])
def test_a_string_whose_end_is_in_doubt_is_no_call(text: str) -> None:
    for family in ("lfm2", "olmo3"):
        output = WRITERS[family]("'", text)
        found = read(family, output)
        assert not found.calls
        assert found.text == output
