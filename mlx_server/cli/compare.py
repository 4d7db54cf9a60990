"""`mlx-server compare`: whether a model answers as well as another."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import jsonschema
import typer
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from rich.console import Console

from mlx_server.api.file_inputs import numbered_lines
from mlx_server.api.training_data import STORED, conversation_of
from mlx_server.cli.root import ConfigFile, command_app
from mlx_server.cli.terminal import print_table
from mlx_server.cli.train import stored_data
from mlx_server.clients.comparison import ServedModel, served_findings, without_key
from mlx_server.config.models_yaml import load_settings, spec_named
from mlx_server.engine.comparison import (
    Answers,
    ComparisonJob,
    Divergence,
    Finding,
    Side,
    findings,
)
from mlx_server.errors import BadRequest, ComparisonFailed, ServerError
from mlx_server.events import folded
from mlx_server.generation.rendering import tokenized
from mlx_server.grammars.check import readable
from mlx_server.grammars.view import View
from mlx_server.messages import Conversation, Tool
from mlx_server.models.adapter_catalog import check_name
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.pool.adapters import catalog_of
from mlx_server.pool.models import progress_display
from mlx_server.pool.prepare import PreparedModel, prepare

app = command_app()

QUESTIONS = (
    "What is the capital of France, and which river runs through it?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into German: The train to the coast leaves at noon.",
    "A shirt costs 40 euros after a discount of 20 %. What did it cost before?",
    "Name three causes of the French Revolution in one sentence each.",
    "Complete the line: Shall I compare thee to a summer's day?",
    "Explain to a child why the sky is blue.",
    "List the planets of the solar system from the sun outwards, as a JSON array of strings.",
)
"""What is asked without a file."""

URL = re.compile(r"https?://")


@dataclass(frozen=True)
class Request:
    prompt: str
    """The last message's text, which the page shows."""
    schema: Mapping[str, Any] | None = None
    """The schema that the answer's JSON has to follow, if any."""
    tools: Sequence[Tool] = ()


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer as clients read it."""

    content: str
    calls: Sequence[tuple[str, str]] = ()
    """The names and arguments."""
    is_repaired: bool = False


@dataclass(frozen=True)
class ComparisonResult:
    """How the second model differs from the first one."""

    divergences: Sequence[Divergence]
    sides: Sequence[Answers]
    answers: Sequence[Sequence[ParsedAnswer]]
    """The answers of each side."""

    @classmethod
    def of(
        cls, found: Iterable[Finding], read: Callable[[int, Answers], list[ParsedAnswer]]
    ) -> "ComparisonResult":
        """read: parses the answers of a side."""
        with Console(stderr=True).status("The first model answers, then both are compared"):
            results = [*found]
        sides = [each for each in results if isinstance(each, Answers)]
        divergences = [each for each in results if isinstance(each, Divergence)]
        if not any(each.kl for each in divergences):
            raise ComparisonFailed(
                "The first model answers nothing: there are no tokens to compare."
            )
        return cls(divergences, sides, [*map(read, range(len(sides)), sides)])

    @property
    def kl(self) -> float:
        return mean(kl for each in self.divergences for kl in each.kl)

    @property
    def agreement(self) -> float:
        return mean(same for each in self.divergences for same in each.agrees)

    @property
    def firsts(self) -> list[int | None]:
        """The token of each answer at which the second model would go on otherwise."""
        agrees = (list(each.agrees) for each in self.divergences)
        return [each.index(False) if False in each else None for each in agrees]


@app.command()
def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A model of models.yaml, or URL[#MODEL].")
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Another: MODEL[:ADAPTER][@kv4|@kv8] or URL[#MODEL].")
    ],
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Conversations to ask, or stored:KEY=VALUE [a small set]."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Maximum tokens of an answer.")] = 64,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page too.")] = None,
    fail_over: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 if KL a token is larger.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Say how much a model's answers differ from another's.

    \b
    mlx-server compare qwen3-bf16 qwen3-4bit
    mlx-server compare qwen3 qwen3@kv8 --requests asked.jsonl
    mlx-server compare qwen3 qwen3:letters --html report.html --fail-over 0.05
    mlx-server compare qwen3 qwen3-new --requests stored:app=mail
    mlx-server compare http://127.0.0.1:8000 http://studio.local:8000#qwen3

    A answers each request, and for each token of its answers both models say what they would have
    expected (KL divergence of B from A, in nats). Both need the same vocabulary. stored:KEY=VALUE:
    the stored chat completions with this metadata. Two servers of this kind are compared by the
    likeliest tokens that they name; a key is given as in http://KEY@studio.local:8000, or on this
    machine is the first of MLX_SERVER_API_KEYS.
    """
    lines = [*_lines(config, requests)]
    if not lines:
        raise typer.BadParameter("There are no requests in it.", param_hint="--requests")
    asked = [_request(number, line) for number, line in enumerate(lines, 1)]
    are_served = [bool(URL.match(each)) for each in (first, second)]
    if any(are_served):
        if not all(are_served):
            raise typer.BadParameter("Name two models, or the URLs of two servers.")
        measured = _served(first, second, lines, asked, tokens)
    else:
        measured = _local(config, first, second, lines, tokens)
    rows, names = [*_rows(asked, measured)], (without_key(first), without_key(second))
    print_table(("", *names), rows, Console(), wrapped=names)
    if html:
        html.write_text(page(rows, asked, measured, names), "utf-8")
    if fail_over is not None and measured.kl > fail_over:
        print(f"KL divergence {measured.kl:.4f} is over {fail_over:g}.")
        raise typer.Exit(1)


def _side(config: Path | None, named: str) -> tuple[PreparedModel, Side]:
    name, _, bits = named.partition("@kv")
    if bits not in ("", "4", "8"):
        raise typer.BadParameter(f"{named!r}: after `@kv` should be 4 or 8.")
    base, _, adapter = name.partition(":") if ":" in name and "/" not in name else (name, "", "")
    spec = spec_named(config, base)
    if spec.upstream:
        raise typer.BadParameter(f"{base} is on another server. Compare two of URL#MODEL.")
    show = progress_display()
    prepared = prepare(spec, lambda *done: show(base, *done), upcast=False)
    folder = None
    if adapter:
        check_name(adapter)
        folder = str(catalog_of(prepared).find(adapter).path)
    return prepared, Side(
        checkpoint=str(prepared.path),
        kv_bits=int(bits) if bits else spec.kv_bits,
        adapter=folder,
    )


def _local(
    config: Path | None, first: str, second: str, lines: Sequence[bytes], tokens: int
) -> ComparisonResult:
    prepared, one = _side(config, first)
    _, other = _side(config, second)
    conversations = [*map(_conversation, lines)]
    job = ComparisonJob(
        sides=(one, other),
        prompts=[tokenized(prepared, each).tokens for each in conversations],
        tokens=tokens,
        stops=sorted(prepared.family.stops(prepared.checkpoint)),
    )
    pairs = partial(zip, [each.tools for each in conversations], strict=True)
    return ComparisonResult.of(
        findings(job),
        lambda _, side: [parsed_answer(prepared, *pair) for pair in pairs(side.tokens)],
    )


def _served(
    first: str, second: str, lines: Sequence[bytes], asked: Sequence[Request], tokens: int
) -> ComparisonResult:
    models = ServedModel(first), ServedModel(second)
    bodies = [*map(_body, lines)]

    def answers(number: int, _: Answers) -> list[ParsedAnswer]:
        """They are asked for only where something is expected of them."""
        return [
            models[number].message(body, tokens, _read)
            if each.schema or each.tools
            else ParsedAnswer("")
            for body, each in zip(bodies, asked, strict=True)
        ]

    return ComparisonResult.of(served_findings(models, bodies, tokens), answers)


def _body(line: bytes) -> dict[str, Any]:
    given = json.loads(line)
    messages = given.get("messages") or [{"role": "user", "content": given["prompt"]}]
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    tools = {"tools": given["tools"]} if given.get("tools") else {}
    return {"messages": messages, **tools}


def _read(completion: dict[str, Any]) -> ParsedAnswer:
    message = completion["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    pairs = [(str(call["name"]), str(call["arguments"])) for call in calls]
    is_repaired = bool(completion.get("mlx_server", {}).get("repairs"))
    return ParsedAnswer(str(message["content"] or ""), pairs, is_repaired=is_repaired)


def _lines(config: Path | None, file: Path | None) -> Iterable[bytes]:
    if file is None:
        return (json.dumps({"prompt": text, "completion": ""}).encode() for text in QUESTIONS)
    if stored := STORED.fullmatch(str(file)):
        return asyncio.run(stored_data(load_settings(config), *stored.groups())).splitlines()
    if not file.is_file():
        raise typer.BadParameter(f"There is no file {str(file)!r}.", param_hint="--requests")
    with file.open("rb") as lines:
        return [line for _, line in numbered_lines(lines)]


def _conversation(line: bytes) -> Conversation:
    conversation = conversation_of(line)
    messages = conversation.messages
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadRequest("A request has no message but the assistant's: nothing is asked.")
    return replace(conversation, messages=messages)


def _request(number: int, line: bytes) -> Request:
    try:
        conversation = _conversation(line)
    except ServerError as error:
        raise BadRequest(f"Request {number} of --requests: {error.message}") from None
    wanted = json.loads(line)
    for name in ("response_format", "json_schema", "schema"):
        wanted = wanted.get(name) if isinstance(wanted, dict) else None
    schema = wanted if isinstance(wanted, dict) else None
    try:
        for each in (schema or {}, *(tool.parameters or {} for tool in conversation.tools)):
            validator_for(each).check_schema(dict(each))
        View(schema or {}).reached()
    except jsonschema.SchemaError as error:
        raise BadRequest(f"A schema of request {number} is not valid: {error.message}") from None
    return Request(conversation.messages[-1].content, schema, conversation.tools)


Row = tuple[str, str, str]


def _rows(asked: Sequence[Request], measured: ComparisonResult) -> Iterable[Row]:
    firsts = [first for first in measured.firsts if first is not None]
    tokens = sum(len(each.kl) for each in measured.divergences)
    yield "requests, tokens of answers", f"{len(asked)}, {tokens}", ""
    yield "mean KL of a token, nats", "0", f"{measured.kl:.6f}"
    worst = max(kl for each in measured.divergences for kl in each.kl)
    yield "largest KL of a token", "0", f"{worst:.4f}"
    yield "same most likely token", "100 %", f"{100 * measured.agreement:.2f} %"
    middle = f", from token {sorted(firsts)[len(firsts) // 2]} on" if firsts else ""
    yield "answers that would differ", "0", f"{len(firsts)} of {len(asked)}{middle}"
    for name, is_valid in (
        ("JSON follows its schema", follows_schema),
        ("a tool is called as its schema says", calls_well),
    ):
        verdicts = ([*map(is_valid, asked, side)] for side in measured.answers)
        counts = [(each.count(True), len(each) - each.count(None)) for each in verdicts]
        (a, of), (b, _) = counts
        if of:
            yield name, f"{a} of {of}", f"{b} of {of}"
    one, other = measured.sides
    yield "seconds", f"{one.seconds:.1f}", f"{other.seconds:.1f}"
    yield "peak memory, GB", f"{one.nbytes / 1e9:.2f}", f"{other.nbytes / 1e9:.2f}"


def parsed_answer(
    prepared: PreparedModel, tools: Sequence[Tool], answer: Sequence[int]
) -> ParsedAnswer:
    tokenizer, stops = prepared.checkpoint.tokenizer, prepared.family.stops(prepared.checkpoint)
    context = ParseContext(tools=tuple(tools), control=tokenizer.control_tokens)
    parser, text = prepared.family.make_parser(context), tokenizer.detokenizer()
    ids = [token for token in answer if token not in stops]
    events = [event for id in ids for event in parser.feed(id, text.feed(id))]
    read = folded([*events, *parser.finish(cut=False)])
    message = read.message()
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return ParsedAnswer(message.content, calls, is_repaired=bool(read.repairs))


def follows_schema(request: Request, answer: ParsedAnswer) -> bool | None:
    """None if the request has no schema."""
    if not request.schema:
        return None
    return _fits(answer.content, request.schema)


def calls_well(request: Request, answer: ParsedAnswer) -> bool | None:
    """Whether the answer has calls, all of them of tools that are offered and with arguments that
    their schemas allow. None if no tools are offered."""
    if not request.tools:
        return None
    schemas = {tool.name: readable(tool.parameters or {}).schema for tool in request.tools}
    fit = (name in schemas and _fits(value, schemas[name]) for name, value in answer.calls)
    return bool(answer.calls) and all(fit) and not answer.is_repaired


def _fits(text: str, schema: Mapping[str, Any]) -> bool:
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:  # an empty registry can't fetch anything
        return bool(validator(schema, registry=Registry()).is_valid(json.loads(text)))
    except (ValueError, Unresolvable):
        return False


STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:60em;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;border-bottom:1px solid #ccc;"
    "text-align:left}svg{display:block;margin:.3em 0 1em}rect{fill:#4a7}rect.other{fill:#c53}"
)
HEIGHT, WIDTH = 60, 6


def page(
    rows: Iterable[Row],
    asked: Sequence[Request],
    measured: ComparisonResult,
    names: tuple[str, str],
) -> str:
    """A page with the table and, for each answer, a bar a token."""
    title = escape(f"{names[1]} compared with {names[0]}")
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    charts = zip(asked, measured.divergences, strict=True)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><table><tr><th></th><th>{escape(names[0])}</th>"
        f"<th>{escape(names[1])}</th></tr>{table}</table><h2>KL divergence by token</h2>"
        "<p>Full height is 1 nat. Red: another token is the likeliest.</p>"
        + "".join(f"<p>{escape(a.prompt[:200])}</p>{_chart(d)}" for a, d in charts)
    )


def _chart(divergence: Divergence) -> str:
    bars = "".join(
        f'<rect x="{WIDTH * at}" y="{HEIGHT - height:.1f}" width="{WIDTH - 1}" '
        f'height="{height:.1f}"{"" if same else other}><title>{kl:.4f}</title></rect>'
        for at, (kl, same) in enumerate(zip(divergence.kl, divergence.agrees, strict=True))
        for height, other in [(max(1.0, HEIGHT * min(1.0, kl)), ' class="other"')]
    )
    return f'<svg width="{WIDTH * len(divergence.kl)}" height="{HEIGHT}">{bars}</svg>'
