"""Schemas and grammars that are meant to hurt: refused, or compiled in little time and memory."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.grammars.compiler import STACK_BYTES
from mlx_server.grammars.lark import Lark
from mlx_server.requests import Format, GrammarFormat, JsonFormat, RegexFormat
from tests.grammars.matching import Refused, compiled
from tests.slowness import slowness

pytestmark = pytest.mark.slow

MOST_WAITED_SECONDS = 120
MOST_SECONDS, MOST_MEGABYTES = 6, 256
"""Of the processor, of which the hardest take four to five; and of all that the process takes."""


def chain(length: int, link: Callable[[dict[str, str]], Any]) -> JsonFormat:
    links = {str(at): link({"$ref": f"#/$defs/{at + 1}"}) for at in range(length)}
    last = {"type": "object", "properties": {"a": {"type": "string"}}}
    return JsonFormat({"$ref": "#/$defs/0", "$defs": {**links, str(length): last}})


def nested(depth: int, around: Callable[[Any], Any]) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = around(found)
    return found


def named(count: int, inner: Callable[[int], Any], **more: Any) -> JsonFormat:
    return JsonFormat({"properties": {f"k{at}": inner(at) for at in range(count)}, **more})


def cross(*sizes: int) -> JsonFormat:
    def options(size: int, at: int) -> Any:
        return {"anyOf": [{"properties": {f"{at}_{n}": {"type": "string"}}} for n in range(size)]}

    return JsonFormat({"allOf": [options(size, at) for at, size in enumerate(sizes)]})


def joined_patterns(count: int) -> JsonFormat:
    return JsonFormat(
        {"allOf": [{"pattern": f"(a|b|{n})*a(a|b){{{20 + n}}}"} for n in range(count)]}
    )


CASES: dict[str, Callable[[], Format]] = {
    "constant of 10 MiB": lambda: JsonFormat({"const": "x" * 10 * 1024 * 1024}),
    "constant": lambda: JsonFormat({"const": "x" * 250_000}),
    "minItems 10^6": lambda: JsonFormat({"minItems": 10**6}),
    "minItems": lambda: named(
        500, lambda n: {"items": {"minimum": n}, "minItems": 10_000, "maxItems": 10_000}
    ),
    "minLength": lambda: named(500, lambda n: {"minLength": 9_000 + n, "maxLength": 100_000 + n}),
    "enum of 10^5": lambda: JsonFormat({"enum": list(range(100_000))}),
    "enum of texts": lambda: JsonFormat({"enum": [f"value {n}" for n in range(9_999)]}),
    "enum of objects": lambda: JsonFormat({"enum": [{"k": {"j": [n]}} for n in range(4_000)]}),
    "depth 10^5": lambda: JsonFormat(nested(100_000, lambda inner: {"items": inner})),
    "list depth 10^5": lambda: JsonFormat(nested(100_000, lambda inner: [inner])),
    "depth": lambda: JsonFormat(nested(47, lambda inner: {"properties": {"a": inner}})),
    "allOf depth": lambda: JsonFormat(
        nested(46, lambda inner: {"allOf": [inner, {"type": "object"}]})
    ),
    "allOf width": lambda: JsonFormat(
        {"allOf": [{"properties": {f"k{n}": {"type": "string"}}} for n in range(3_000)]}
    ),
    "10^5 properties": lambda: named(10**5, lambda n: {}),
    "properties": lambda: named(
        18, lambda n: named(450, lambda m: {"type": "string"}).schema, additionalProperties=False
    ),
    "properties, too many": lambda: named(
        500, lambda n: {}, additionalProperties=False, minProperties=1
    ),
    "cross product, large": lambda: cross(100, 100, 100),
    "cycle": lambda: JsonFormat({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "bomb of allOf": lambda: chain(100, lambda ref: {"allOf": [ref, ref]}),
    "bomb of members": lambda: chain(400, lambda ref: {"properties": {"x": ref, "y": ref}}),
    "bomb of anyOf": lambda: chain(
        100, lambda ref: {"items": ref, "anyOf": [ref, {"type": "array"}]}
    ),
    "bomb of joined members": lambda: chain(
        15, lambda ref: {"allOf": [{"properties": {"x": ref}}, {"properties": {"x": ref}}]}
    ),
    "chain of references": lambda: chain(900, lambda ref: {"properties": {"x": ref}}),
    "multiples": lambda: named(10, lambda n: {"multipleOf": 9_973 + n}),
    "joined multiples": lambda: JsonFormat({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
    "patternProperties, too many": lambda: JsonFormat(
        {"patternProperties": {f"^k{n}_": {} for n in range(65)}}
    ),
    "joined patterns, too many": lambda: joined_patterns(20),
    "pattern and length": lambda: JsonFormat(
        {"pattern": "(a|b|c)*a(a|b){400}", "minLength": 30, "format": "email"}
    ),
    "patterns": lambda: named(500, lambda n: {"pattern": f"^(a|b)*a(a|b){{{n + 1}}}$"}),
    "catastrophic": lambda: JsonFormat({"type": "string", "pattern": "^(a+)+$"}),
    "nested repetitions": lambda: JsonFormat({"pattern": "(((a{1,99}){1,99}){1,99}){1,99}"}),
    "repetitions": lambda: JsonFormat({"pattern": r"^(\p{L}{1,200}){1,200}$"}),
    "oneOf": lambda: JsonFormat({"oneOf": [{"enum": [f"{n}", f"x{n}"]} for n in range(3_000)]}),
    "regex": lambda: RegexFormat(r"((\w+\s?){1000}|(.*a){500}|(x+x+)+y){10}"),
    "regex depth": lambda: RegexFormat("(a|" * 480 + "a" + ")" * 480),
    "rules": lambda: GrammarFormat(
        "start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(490)) + '\na490: "x"'
    ),
    "terminals": lambda: GrammarFormat(
        "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(490)) + '\nA490: "x"'
    ),
    "ambiguous": lambda: GrammarFormat('start: a\na: a a | b a | "x" |\nb: a b | a'),
    "repeated": lambda: GrammarFormat('start: (("a"?){1000000}){1000000}'),
    "intersections": lambda: GrammarFormat(
        "start: A\nA: " + " & ".join(f"/(a|b|{n})*a(a|b){{{20 + n}}}/" for n in range(9))
    ),
    "alternatives": lambda: GrammarFormat("start: " + " | ".join(f'"{n}"' for n in range(9_000))),
    "brackets": lambda: GrammarFormat("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "GBNF brackets": lambda: GrammarFormat("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "GBNF": lambda: GrammarFormat(
        "root ::= r0\n" + "\n".join(f'r{n} ::= [a-z]+ r{n}? ("x" | r0)*' for n in range(400))
    ),
}


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported all, and forks itself for each case."""
    command = [sys.executable, "-m", "tests.grammars.test_hostile"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_or_cheap(forking: subprocess.Popen[str], name: str) -> None:
    assert forking.stdin
    assert forking.stdout
    forking.stdin.write(f"{name}\n")
    reported = json.loads(forking.stdout.readline())
    assert reported["status"] == 0, reported
    assert reported["seconds"] < MOST_SECONDS * slowness(), reported
    assert reported["megabytes"] < MOST_MEGABYTES, reported


def run(name: str) -> str:
    """In a process of its own: a stack that overflows ends it."""
    wanted = CASES[name]()
    begun = time.process_time()
    try:
        formats.check(wanted, "format")
        _compile_and_step(wanted)
        outcome = "compiled"
    except (InvalidGrammar, Refused) as error:
        outcome = str(error)[:100]
    return json.dumps(
        {"outcome": outcome, "seconds": time.process_time() - begun, "megabytes": _peak() / 2**20}
    )


def _compile_and_step(wanted: Format) -> None:
    lark, chance = Lark(), random.Random(1)
    matcher = compiled(lark.source(formats.format_rule(wanted, lark)).source)
    for _ in range(100):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise Refused(matcher.get_error())
        tokens = [at for at in range(256) if mask[at >> 3] >> (at & 7) & 1]
        if not tokens or not matcher.consume_token(chance.choice(tokens)):
            break


def _peak() -> int:
    """Bytes. Of this program alone: Linux counts for getrusage also what ran before it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_in_thread(name: str) -> None:
    threading.stack_size(STACK_BYTES)  # as the engine compiles
    thread = threading.Thread(target=lambda: print(run(name), flush=True))
    thread.start()
    thread.join()


def forked(name: str) -> dict[str, Any]:
    """What it reports, and how its process ended."""
    with tempfile.TemporaryFile("w+") as out:
        if not (child := os.fork()):
            os.dup2(out.fileno(), sys.stdout.fileno())
            signal.alarm(MOST_WAITED_SECONDS)
            run_in_thread(name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        return {"status": status, **json.loads(out.read() or "{}")}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(forked(line.rstrip("\n"))), flush=True)
