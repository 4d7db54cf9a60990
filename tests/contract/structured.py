"""Realistic schemas and tools, and whether the demo model keeps to them at temperature 1.

It is small and has never seen a tool: what it keeps to, it is held to.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import jsonschema
import typer

from mlx_server.sources.source import resolve
from tests.contract.corpus import print_corpus
from tests.live.server import DEMO, DEMO_MODEL, LiveServer, serving

Schema = Mapping[str, Any]

TOKENS = 400
TOGETHER = 8


def closed(properties: Schema, *optional: str, **more: Any) -> dict[str, Any]:
    """An object of these members and no others."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


TEXT, WHOLE, TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}

SIMPLE = closed(
    {"name": TEXT, "age": {**WHOLE, "minimum": 0, "maximum": 120}, "email": TEXT, "member": TRUTH},
    "email",
)
ADDRESS = closed(
    {"street": TEXT, "city": TEXT, "country": {"enum": ["CH", "DE", "FR", "IT", "AT"]}}, "street"
)
ITEM = closed(
    {"sku": TEXT, "quantity": {**WHOLE, "minimum": 1}, "price": {"type": "number", "minimum": 0}}
)
NESTED = closed(
    {
        "id": WHOLE,
        "status": {"$ref": "#/$defs/status"},
        "customer": closed(
            {
                "name": TEXT,
                "billing": {"$ref": "#/$defs/address"},
                "shipping": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
            }
        ),
        "items": {"type": "array", "minItems": 1, "items": ITEM},
    },
    **{"$defs": {"address": ADDRESS, "status": {"enum": ["new", "paid", "shipped", "returned"]}}},
)
KINDS = ({**TEXT, "maxLength": 20}, WHOLE, TRUTH, {"enum": ["low", "medium", "high"]})
FORTY = closed({f"field_{n}": KINDS[n % len(KINDS)] for n in range(40)})
NODE = closed({"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})
RECURSIVE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}
FORMATS = closed(
    {
        "id": {**TEXT, "format": "uuid"},
        "created": {**TEXT, "format": "date-time"},
        "email": {**TEXT, "format": "email"},
        "ip": {**TEXT, "format": "ipv4"},
        "phone": {**TEXT, "pattern": r"^\+\d{2} \d{2} \d{3} \d{2} \d{2}$"},
        "plate": {**TEXT, "pattern": "^[A-Z]{2}-[0-9]{1,6}$"},
        "tags": {
            "type": "array",
            "items": {**TEXT, "pattern": "^[a-z]+(-[a-z]+)*$"},
            "maxItems": 5,
        },
    },
    *("ip", "tags"),
)

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "simple": ("Describe a person.", SIMPLE),
    "nested, enums, $refs": ("Write an order of a web shop.", NESTED),
    "40 properties": ("Fill in the form.", FORTY),
    "recursive": ("Write the table of contents of a book, as a tree.", RECURSIVE),
    "formats, patterns": ("Write a customer's record.", FORMATS),
}

PARAMETERS: dict[str, Schema] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": TEXT, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
    },
    "add": {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "required": ["a", "b"]},
    "place_order": NESTED,
    "list_files": {"type": "object", "properties": {}},
}
"""Only what these list: an argument that is not among them is invented."""

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
QUESTIONS = (
    "What is the weather like in Paris?",
    "What is 17 and 25?",
    "Send me three lamps.",
    "Which files are there?",
    "Hello!",
)
CALLS = "calls, required"


@dataclass(frozen=True)
class CheckedText:
    """An answer, and what is wrong with it."""

    text: str
    tokens: int
    fault: str | None


@dataclass(frozen=True)
class Outcome:
    case: str
    reported: list[CheckedText]
    seconds: float

    @property
    def faults(self) -> list[CheckedText]:
        return [each for each in self.reported if each.fault]


def body(case: str, number: int) -> dict[str, Any]:
    if case == CALLS:
        question = QUESTIONS[number % len(QUESTIONS)]
        return {**asking(question, number), "tools": TOOLS, "tool_choice": "required"}
    question, schema = SCHEMAS[case]
    wanted = {"name": "answer", "schema": schema, "strict": True}
    response_format = {"type": "json_schema", "json_schema": wanted}
    return {**asking(question, number), "response_format": response_format}


def asking(text: str, seed: int) -> dict[str, Any]:
    return {
        "model": DEMO,
        "messages": [{"role": "user", "content": text}],
        "temperature": 1,
        "max_tokens": TOKENS,
        "seed": seed,
    }


def judged(case: str, completion: Any) -> CheckedText:
    (choice,) = completion["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    text = json.dumps(calls) if case == CALLS else message["content"]
    try:
        if case == CALLS:
            _check_calls(calls, choice["finish_reason"])
        else:
            _check(json.loads(text), SCHEMAS[case][1])
            _equal(choice["finish_reason"], "stop")
        fault = None
    except (ValueError, jsonschema.ValidationError) as error:
        fault = str(error).splitlines()[0]
    return CheckedText(text, completion["usage"]["completion_tokens"], fault)


def _check_calls(calls: Sequence[Mapping[str, Any]], finish: str) -> None:
    _equal(finish, "tool_calls")
    for call in calls:
        schema = PARAMETERS[call["name"]]
        _check(json.loads(call["arguments"]), {"additionalProperties": False, **schema})


def _check(value: Any, schema: Schema) -> None:
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


def _equal(finish: str, wanted: str) -> None:
    if finish != wanted:
        raise ValueError(f"finish_reason {finish}")


async def asked(server: LiveServer, case: str, answers: int) -> Outcome:
    places = asyncio.Semaphore(TOGETHER)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=None) as http:

        async def one(number: int) -> CheckedText:
            async with places:
                response = await http.post("/v1/chat/completions", json=body(case, number))
            response.raise_for_status()
            return judged(case, response.json())

        reported = await asyncio.gather(*map(one, range(answers)))
    return Outcome(case, reported, time.monotonic() - began)


def line(outcome: Outcome) -> str:
    tokens = [each.tokens for each in outcome.reported]
    valid = len(outcome.reported) - len(outcome.faults)
    return (
        f"{outcome.case:22} {valid:4} of {len(tokens):4} valid and ended; tokens: "
        f"{min(tokens)} to {max(tokens)}, median {median(tokens):.0f}; {outcome.seconds:.0f} s"
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    answers: Annotated[int, typer.Option(min=1, help="To each schema; five times for calls.")] = 40,
    only: Annotated[str, typer.Option(metavar="CASE", help="One of the cases.")] = "",
    texts: Annotated[bool, typer.Option("--texts", help="Print every answer.")] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Schemas with instances, without a model's answers."),
    ] = None,
    sample: Annotated[int, typer.Option(help="So many of the corpus's files; 0: all.")] = 0,
) -> None:
    """How many of the demo model's answers are what their schema says, at temperature 1."""
    if corpus:
        print_corpus(corpus, resolve("demo:smollm2", lambda what, done, total: None), sample)
        return
    cases = [only] if only else [*SCHEMAS, CALLS]
    faults = 0
    with (
        TemporaryDirectory() as name,
        serving(Path(name), {"models": {DEMO: DEMO_MODEL}}) as server,
    ):
        for case in cases:
            times = len(SCHEMAS) if case == CALLS else 1
            outcome = asyncio.run(asked(server, case, answers * times))
            print(line(outcome), flush=True)
            for reported in outcome.reported if texts else outcome.faults:
                print(f"  {reported.fault or 'valid'}: {reported.text!r}")
            faults += len(outcome.faults)
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    app(prog_name="scripts/structured")
