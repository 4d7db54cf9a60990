"""Runs the suites, prints their results, and fails for results that EXPECTED.md does not
explain."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from conformance_parts import document, expected, installed
from conformance_parts.claude_code import SUITE as CLAUDE
from conformance_parts.claude_code import claude_code
from conformance_parts.codex import SUITE as CODEX
from conformance_parts.codex import codex
from conformance_parts.comply import comply
from conformance_parts.connected import SUITE as AGENTS
from conformance_parts.connected import agents
from conformance_parts.expected import Known
from conformance_parts.langchain import SUITE as LANGCHAIN
from conformance_parts.langchain import langchain
from conformance_parts.long_sessions import SUITE as LONG
from conformance_parts.long_sessions import long_sessions
from conformance_parts.mcp_suite import SUITE as MCP
from conformance_parts.mcp_suite import mcp
from conformance_parts.outcomes import Outcome
from conformance_parts.pictures import SUITE as PICTURES
from conformance_parts.pictures import pictures
from conformance_parts.probe import SUITE as PROBE
from conformance_parts.probe import probe
from conformance_parts.served import THINKER, forwarding, server
from conformance_parts.talks import CLIENTS, NODE_CLIENTS, node_talk, talk
from conformance_parts.upstreams import SUITE as UPSTREAMS
from conformance_parts.upstreams import upstreams
from conformance_parts.watsonx import SUITE as WATSONX
from conformance_parts.watsonx import watsonx
from tests.live.server import DEMO, LiveServer

PROGRAMS = {
    CLAUDE: claude_code,
    CODEX: codex,
    AGENTS: agents,
    LONG: long_sessions,
    PICTURES: pictures,
    UPSTREAMS: upstreams,
    MCP: mcp,
    WATSONX: watsonx,
}
"""The suites that start servers of their own."""
PARTS = ("llm-comply", PROBE, *CLIENTS, *NODE_CLIENTS, LANGCHAIN, *PROGRAMS)
StartServer = Callable[[Iterable[str]], AbstractContextManager[LiveServer]]
"""Starts the server that is tested, for these clients."""

PIPE_WIDTH = 120
DETAIL = 400

COUNTED = ("passed", "known", "failed", "skipped")
COLUMNS = ("suite", "of", "passed", "failed, explained", "failed", "skipped")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
progress = Console(stderr=True, highlight=False)


@app.command()
def main(
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Only these parts.", show_default=True)
    ] = ",".join(PARTS),
    upstream: Annotated[
        bool, typer.Option("--upstream", help="Ask a second server, whose upstream is the first.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results to this file.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Update the rows of these clients in this file."),
    ] = None,
) -> None:
    """Run other projects' test suites and clients against a live server.

    \b
    scripts/conformance
    scripts/conformance --only openai,agents
    scripts/conformance --only llm-comply,openai,langchain-tests --upstream
    scripts/conformance --only llm-comply --json found.json
    scripts/conformance --only connected --table mlx_server/clients/TESTED.md

    A failure that scripts/conformance_parts/EXPECTED.md explains is known; any other is an error.
    """
    parts = only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"--only has no part {', '.join(sorted(unknown))}.")
    found = list(_printed(_run(parts, forwarding if upstream else server)))
    if json:
        json.write_bytes(msgspec.json.encode(found))
    if table:
        document.update(table, found)
    known = expected.expected()
    _show(found, known)
    failed = [each for each in found if each.verdict == "failed"]
    raise typer.Exit(int(not all(expected.explanation(each, known) for each in failed)))


def _run(parts: Collection[str], start: StartServer) -> Iterator[Outcome]:
    for part in parts:
        if part in PROGRAMS:
            yield from PROGRAMS[part]()
    if rest := [part for part in parts if part not in PROGRAMS]:
        yield from _served(rest, start)


def _served(parts: Collection[str], start: StartServer) -> Iterator[Outcome]:
    python = installed.clients()
    progress.out("The clients are there, the server starts ...")
    with start([each for each in (*CLIENTS, *NODE_CLIENTS) if each in parts]) as served:
        for part in parts:
            if part == "llm-comply":
                for model in (DEMO, THINKER):
                    yield from comply(python, model, served.url)
            elif part == PROBE:
                yield from _probed(served.url)
            elif part == LANGCHAIN:
                yield from langchain(python, served.url)
            elif part in NODE_CLIENTS:
                yield from node_talk(part, served.url)
            else:
                yield from talk(python, part, served.url)
        yield _log(served.log)


def _probed(url: str) -> Iterator[Outcome]:
    try:
        command = installed.probe()
    except installed.Missing as missing:
        yield Outcome(PROBE, DEMO, "all of it", "skipped", (str(missing),))
    else:
        yield from probe(command, DEMO, url)


def _log(text: str) -> Outcome:
    """Returns whether our server's log has errors, as an outcome with their lines."""
    bad = [line for line in text.splitlines() if "Traceback" in line or " ERROR " in line]
    return Outcome("server", "log", "no errors", "failed" if bad else "passed", tuple(bad))


def _printed(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Prints the outcomes one by one, and passes them on."""
    for each in outcomes:
        mark = {"passed": "+", "failed": "-", "skipped": "?"}[each.verdict]
        why = "" if each.verdict == "passed" else f"  {_why(each)}"
        progress.out(f"{mark} {' / '.join(each.key)}{why}")
        yield each


def _why(outcome: Outcome) -> str:
    return "; ".join(dict.fromkeys(outcome.why))[:DETAIL]


def _show(found: Sequence[Outcome], known: Sequence[Known]) -> None:
    console = Console()
    console.width = console.width if console.is_terminal else PIPE_WIDTH
    console.print(_totals(found, known))
    for each in found:
        if each.verdict == "failed":
            why = expected.explanation(each, known)
            state = f"known: {why}" if why else f"NOT EXPLAINED: {_why(each)}"
            console.out(f"{' / '.join(each.key)}\n    {state}", highlight=False)
    for line in expected.outdated(found, known):
        name = f"{line.suite} / {line.subject} / {line.test}"
        console.out(f"{name}\n    no longer fails: take it out of EXPECTED.md", highlight=False)


def _totals(found: Sequence[Outcome], known: Sequence[Known]) -> Table:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for each in found:
        is_known = each.verdict == "failed" and expected.explanation(each, known)
        counted = "known" if is_known else each.verdict
        counts.setdefault((each.suite, each.subject), Counter())[counted] += 1
    table = Table(*COLUMNS)
    for (suite, subject), count in counts.items():
        numbers = (count[name] for name in COUNTED)
        table.add_row(suite, subject, *map(str, numbers))
    return table


if __name__ == "__main__":
    app(prog_name="scripts/conformance")
