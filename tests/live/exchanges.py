"""Exchanges over HTTP, recorded before a change that should change nothing, compared after it.

    scripts/exchanges record FILE     ask a server some 850 things, and write its answers
    scripts/exchanges check FILE      ask again, and show which answers differ
    ... --without REGEX               what matches it counts for nothing: a field that is new

Every golden output of every family is played, streamed and not, and the demo model answers
greedily on each endpoint. Ids and times are replaced by their kind; the rest is compared byte for
byte.
"""

import argparse
import difflib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from mlx_server.families import FAMILIES
from tests.live.server import DEMO, DEMO_MODEL, serving
from tests.live.test_families import TOOLS, cases, entry

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE = "/generate"
NAMES = [family.name for family in FAMILIES]

VARYING = [
    (
        re.compile(r"\b(chatcmpl|cmpl|resp|msg|rs|fc|call|conv|ctc|fp|mcp|mcpl|gen|req)([-_])\w+"),
        r"\1\2ID",
    ),
    (re.compile(r'"(id|call_id|tool_call_id)":\s?"[0-9a-zA-Z]{9,}"'), r'"\1":"ID"'),
    (re.compile(r'"(created\w*|completed_at|expires_at|\w*_(ms|seconds))":\s?[\d.]+'), r'"\1":0'),
]


@dataclass(frozen=True)
class Request:
    name: str
    path: str
    body: Any = None
    method: str = "POST"


@dataclass(frozen=True)
class Exchange:
    name: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""


def families() -> Iterator[Request]:
    for family in NAMES:
        for case in cases(family):
            messages = [{"role": "user", "content": case["name"]}]
            asked = {"model": family, "messages": messages, "tools": TOOLS, "max_tokens": 4000}
            name = f"{family}: {case['name']}"
            yield Request(name, CHAT, asked)
            yield Request(f"{name}, streamed", CHAT, asked | {"stream": True})


def endpoints() -> Iterator[Request]:
    """One golden output of each family on the other endpoints."""
    for family in NAMES:
        text = cases(family)[0]["name"]
        functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
        asked = {"model": family, "input": text, "tools": functions, "store": False}
        yield Request(f"{family}: response", RESPONSES, asked)
        yield Request(f"{family}: response, streamed", RESPONSES, asked | {"stream": True})
        native = {
            "model": family,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4000,
        }
        yield Request(f"{family}: generate", GENERATE, native)
        yield Request(f"{family}: generate, streamed", GENERATE, native | {"stream": True})


GREEDY = {"model": DEMO, "temperature": 0, "max_tokens": 24}
INTERLEAVED = ("two choices", "completions")
"""Two rows of a stream take turns as their timing has it."""


def demo() -> Iterator[Request]:
    for line in Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines():
        asked = json.loads(line)
        name, path = f"demo: {asked['name']}", asked["path"]
        body = {k: v for k, v in (GREEDY | asked["body"]).items() if v is not None}
        yield Request(name, path, body)
        if asked["name"] not in INTERLEAVED:
            yield Request(f"{name}, streamed", path, body | {"stream": True})


def others() -> Iterator[Request]:
    for path in ("/v1/models", f"/v1/models/{DEMO}", "/v1/models/none", "/health", "/none"):
        yield Request(f"GET {path}", path, method="GET")
    yield Request("GET chat", CHAT, method="GET")
    yield Request("tokens", f"{RESPONSES}/input_tokens", {"model": DEMO, "input": "Hello."})
    yield Request("no JSON", CHAT, "{")
    yield Request("a list", CHAT, [])


def requests() -> list[Request]:
    return [*families(), *endpoints(), *demo(), *others()]


def exchange(http: httpx.Client, request: Request) -> Exchange:
    text = request.body if isinstance(request.body, str) else json.dumps(request.body)
    headers = {"content-type": "application/json"}
    content = text if request.method == "POST" else None
    response = http.request(request.method, request.path, content=content, headers=headers)
    kept = {name: value for name, value in response.headers.items() if is_kept(name)}
    return Exchange(request.name, response.status_code, kept, constant(response.text))


def is_kept(header: str) -> bool:
    return header in ("content-type", "retry-after") or header.startswith("x-mlx-server-ignored")


def constant(text: str) -> str:
    for pattern, kind in VARYING:
        text = pattern.sub(kind, text)
    return text


def exchanges() -> list[Exchange]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in NAMES:
            lines = [json.dumps(entry(case)) for case in cases(family)]
            (folder / f"{family}.jsonl").write_text("\n".join(lines), "utf-8")
        models: dict[str, Any] = {
            family: {"source": f"replay:{family}.jsonl", "family": family} for family in NAMES
        }
        config = {"models": {**models, DEMO: DEMO_MODEL}}
        with serving(folder, config) as server, server.http() as http:
            http.timeout = httpx.Timeout(120)
            return [exchange(http, request) for request in requests()]


def differences(before: list[Exchange], after: list[Exchange]) -> Iterator[str]:
    then = {each.name: each for each in before}
    for each in after:
        old = then.pop(each.name, None)
        if old != each:
            was = lines_of(old) if old else []
            yield f"-- {each.name}\n" + "\n".join(
                line[:300] for line in difflib.unified_diff(was, lines_of(each), n=0, lineterm="")
            )
    yield from (f"-- {name}: not asked any more" for name in then)


def without(pattern: re.Pattern[str], some: list[Exchange]) -> list[Exchange]:
    return [replace(each, body=pattern.sub("", each.body)) for each in some]


def lines_of(exchange: Exchange) -> list[str]:
    return [str(exchange.status), str(exchange.headers), *exchange.body.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/exchanges", description=__doc__)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--without", type=re.compile, default=re.compile(r"(?!)"))
    given = parser.parse_args()
    found = exchanges()
    if given.action == "record":
        text = "\n".join(json.dumps(asdict(each), ensure_ascii=False) for each in found)
        given.file.write_text(text, "utf-8")
        print(f"{len(found)} exchanges in {given.file}")
        return 0
    lines = given.file.read_text("utf-8").split("\n")
    before = [Exchange(**json.loads(line)) for line in lines]
    differ = list(differences(*(without(given.without, some) for some in (before, found))))
    print(*differ, f"{len(found)} exchanges, {len(differ)} differ", sep="\n")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
