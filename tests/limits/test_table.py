"""Every limit is enforced, tested and documented, and there are no others."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.limits import table
from mlx_server.limits.limit import Limit

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "mlx_server"
TABLE = PRODUCT / "limits"
NAMED = table.named()

LIKE_A_LIMIT = re.compile(
    "_?(MOST|MAX|LARGEST|LONGEST|DEEPEST|WIDEST)|.*_(BYTES|CHARACTERS|ITEMS|DEPTH|LIMIT)$"
)

OTHERS = {
    "api/body.LARGE_BYTES": "where work moves from the event loop to a thread",
    "api/fields.MAX_ADAPTER_SCALE": "a factor, which makes nothing grow",
    "api/media.HEAD_BYTES": "how much of a picture is read for its size",
    "api/media.TYPE_CHARACTERS": "the length of a name in a line of text",
    "api/media.URL_CHARACTERS": "the length of a URL in a line of text",
    "api/messages/model_list.MOST": "a page of the owner's models",
    "api/ollama/keep_alive.MOST_CHARACTERS": "a length in a format",
    "api/ollama/keep_alive.MOST_SECONDS": "a number's bound",
    "api/responses/runs.LONGEST_RETRY_SECONDS": "a pause of our own",
    "api/responses/web_socket.PIECE_BYTES": "how much is read at a time",
    "api/strict_json.LONGEST_ESCAPE": "a length in a format",
    "api/transport/framing.SMALL_BYTES": "what counts as a small chunk; SMALL_CHUNKS counts them",
    "api/transport/slow_clients.LEAST_BYTES": "how slow a reader is who does not read",
    "checkpoints/checkpoint.MOST_STRETCHED": "tells a damaged file; memory bounds the context",
    "checkpoints/folder_check.MOST_BYTES": "a table of its own: a size for each file",
    "checkpoints/folder_check.SAMPLE_BYTES": "how much of a file its digest is made of",
    "cli/hosts/command.MOST_BYTES": "how much of a host's answer the owner's doctor reads",
    "cli/hosts/command.SHOWN_CHARACTERS": "how much of a host's answer the doctor shows",
    "cli/hosts/link.SLOW_BYTES": "when a cable is said to be slow",
    "cli/hosts/probe.MOST_HASHED": "how much of a file its digest is made of",
    "cli/recording.MAX_FILE_BYTES": "the owner's file",
    "config/hostfile.MAX_ADDRESSES": "of a file that the owner wrote",
    "config/hostfile.MAX_HOSTS": "of a file that the owner wrote",
    "config/hostfile.MAX_VARIABLES": "of a file that the owner wrote",
    "config/yaml_lines.MAX_DEPTH": "the owner's file",
    "config/yaml_lines.MAX_FILE_BYTES": "the owner's file",
    "config/yaml_lines.MAX_NUMBER_LENGTH": "the owner's file",
    "engine/row_stream.ITEM_BYTES": "how UNREAD_BYTES counts",
    "engine/engine_process.SOCKET_BUFFER_BYTES": "a buffer's size",
    "engine/messages/__init__.HEADER_BYTES": "a length in a format",
    "engine/supervisor.LONGEST_PAUSE": "a pause of our own",
    "engine/wired_memory.MOST_SHARE": "a share of the budget",
    "generation/output.LONGEST_DELIMITER": "how far back a delimiter's first token is looked for",
    "generation/overflow.COUNTED_CHARACTERS": "beyond it a message has an estimate",
    "json_bounds.MOST_VALUES": "of an upstream's event; the same as JSON_STRINGS",
    "lora/config.LARGEST": "a factor, which makes nothing grow",
    "mcp/oauth.ERROR_CHARACTERS": "where words are cut",
    "mcp/oauth.FILE_BYTES": "tells a damaged file",
    "mcp/oauth.SCOPE_CHARACTERS": "where words are cut",
    "parsers/harmony/text_parser.LONGEST_HEADER": "where a search for a control token ends",
    "parsers/harmony/text_parser.LONGEST_DELIMITER": "the longest of the format's own marks",
    "parsers/markup/calls.LONGEST_PROSE": "how much of a line is looked at around a call",
    "pdf/child.MOST_FORMS": "how deep forms within forms are read; a limit of recursion",
    "pool/memory_budget.WORKING_BYTES": "what the budget leaves for the process itself",
    "prompt_files/contents.CHECKSUM_BYTES": "a length in a format",
    "prompt_files/contents.HEADER_BYTES": "tells a damaged file",
    "prompt_files/contents.PIECE_BYTES": "how much of a file is read or written at a time",
    "prompt_files/folder.RESERVE_BYTES": "space that is left to other programs",
    "prompts/harmony/prompt.LONGEST_NAME": "a slower library is kept from the square of a length",
    "prompts/harmony/text_pieces.LONGEST_WORD": "where words are cut",
    "prompts/message_normalization.MOST_NESTED": "half of JSON_DEPTH",
    "repair/exact.MOST_VALUES": "of what a model writes; the same as JSON_NODES",
    "sandbox/child.LENGTH_BYTES": "a length in a format",
    "schemas/instance_texts.MOST_SUFFIXES": "where an ending is given up",
    "schemas/instance_texts.MOST_TEXTS": "where an ending is given up",
    "schemas/plain.LONGEST": "from where on a schema is compiled before too",
    "schemas/plain.MOST_PARTS": "from where on a schema is compiled before too",
    "schemas/plain.MOST_COPIED": "from where on a schema is compiled before too",
    "schemas/plain.DEEPEST": "from where on a schema is compiled before too",
    "schemas/plain.MOST_JOINED": "from where on a schema is compiled before too",
    "schemas/plain.LARGEST_PATTERNS": "from where on a schema is compiled before too",
    "schemas/report._LARGEST": "a number, which makes nothing grow",
    "schemas/regex_tails.MOST_TAILS": "where an ending is given up",
    "schemas/regex_tails.MOST_CHARACTERS": "where an ending is given up",
    "schemas/regex_tails.MOST_REPEATS": "where an ending is given up",
    "schemas/unsatisfiable.MOST_STEPS": "how deep a part that can't be met is sought",
    "schemas/shortest.MOST_CHARACTERS": "where an ending is given up",
    "schemas/shortest.MOST_PARTS": "where an ending is given up",
    "schemas/shortest.MOST_OPTIONS": "where an ending is given up",
    "schemas/shortest.MOST_LOOKS": "where an ending is given up",
    "schemas/shortest.MOST_SEARCHED": "where an ending is given up",
    "schemas/shortest.MOST_DEPTH": "where an ending is given up",
    "schemas/shortest_number.MOST_BOUNDS": "where an ending is given up",
    "sources/tokenizer_files.SEARCHED_BYTES": "where work moves to another process",
    "sources/transcript_file.MAX_BYTES": "the owner's file",
    "store/store.BATCH_BYTES": "how much is deleted at a time",
    "store/usage.ROW_BYTES": "how stored bytes are counted",
    "system/allocator.MAPPED_BYTES": "when freed memory is given back",
    "system/log_file.CHUNK_BYTES": "how much is copied at a time",
    "system/own_files.MOST_LINKS": "links of the owner, as many as Linux follows",
    "system/secret_key.KEY_BYTES": "a length in a format",
    "tool_parsers/mixed_blocks.MOST_UNKNOWN": "how often a block is read again; more is text",
    "tool_parsers/source.MOST_STOPS": "how much of a model's end is no text; the rest is text",
    "upstream/breaker.LONGEST_PAUSE": "a pause of our own",
    "upstream/retriable.LONGEST_PAUSE": "a pause of our own",
    "upstream/breaker.MOST_CLIENTS": "a client that is forgotten is only asked for once more",
    "upstream/ends.LONGEST_NAME": "where words are cut",
    "upstream/failures.QUOTED_CHARACTERS": "where words are cut",
    "upstream/usage.MAX_TOKENS": "tells a count that no answer has",
    "worker/buffer_cache.FLOOR_BYTES": "when freed memory is given back",
    "worker/constrained_decoding/completion_proposals.MOST_ENDINGS": "where an ending is given up",
    "worker/constrained_decoding/completion_proposals.MOST_STATES": "where an ending is given up",
    "worker/constrained_decoding/frame_tails.LONGEST": "where an ending is given up",
    "worker/constrained_decoding/frame_tails.MOST_TAILS": "where an ending is given up",
    "worker/constrained_decoding/frame_tails.MOST_RULES": "where an ending is given up",
    "worker/constrained_decoding/frame_tails.MOST_READ": "where an ending is given up",
    "worker/constrained_decoding/mask_threads.MOST_SECONDS": "a schedule: how long masks are made",
    "worker/constrained_decoding/logit_constraints.MAX_LOGIT_SHIFT": "a number's bound",
    "worker/constrained_decoding/token_classes.MOST_BYTES": "how a text is cut into tokens",
    "worker/prefill/budget.MOST": "a schedule: how long a piece of a prompt is",
    "worker/prefill/budget.MOST_USEFUL": "a schedule: how long a piece of a prompt is",
    "worker/prefill/prompt_restorer.PIECE_BYTES": "how much is copied at a time",
    "worker/prefill/prompt_saver.PIECE_BYTES": "how much is copied at a time",
    "worker/prefill/snapshot_places.MOST_SPACED": "a schedule; PROMPT_SNAPSHOTS bounds it",
    "worker/ranks/reports.REPORT_BYTES": "tells what is no report",
    "worker/read_rate.FIRST_BYTES": "how much of a file is read at a time",
    "worker/read_rate.LEAST_BYTES": "how much of a file is read at a time",
    "worker/read_rate.MOST_BYTES": "how much of a file is read at a time",
    "worker/loops.LONGEST_PERIOD": "how far back repeats in an answer are noticed",
    "worker/read_rate.MOST_GROWTH": "how much of a file is read at a time",
    "worker/row_validation.LARGEST_SCALE": "a factor, which makes nothing grow",
    "worker/warm_up.MOST_SECONDS": "of the owner's own start",
    "worker/device_memory.MOST_FREED": "when freed memory is given back",
    "system/http_transport.READ_BYTES": "how much is read at a time",
    "upstream/pieces.PART_CHARACTERS": "how much is parsed at a time",
}
"""Constants that look like a limit on what a client can make grow, and why they are none."""


UNNAMED = {
    "MCP_UNREAD_MESSAGES": "a queue's size: MCP_CALL_SECONDS ends the call that waits for it",
    "STRAY_DELIMITERS": "a count in a grammar, which GRAMMAR_ITEMS_IN_ROW bounds",
}
"""Limits that no test names, and why. It only shrinks."""


def modules(folder: Path) -> Iterator[Path]:
    """But the table's own, and this one."""
    here = Path(__file__)
    return (path for path in folder.rglob("*.py") if path != here and TABLE not in path.parents)


def names_read(path: Path) -> set[str]:
    """What of `limits` is named, as an attribute, an import or the text that lowers one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name("limits"), attr=name):
                found.add(name)
            case ast.ImportFrom(module="mlx_server.limits", names=names):
                found |= {alias.name for alias in names}
            case ast.Constant(value=str(text)) if text in NAMED:
                found.add(text)
    return found


@cache
def read_in(folder: Path) -> frozenset[str]:
    return frozenset().union(*map(names_read, modules(folder)))


@pytest.mark.parametrize("name", NAMED)
def test_the_product_reads_it(name: str) -> None:
    assert name in read_in(PRODUCT)


def test_tests_name_it() -> None:
    unnamed = set(NAMED) - read_in(ROOT / "tests")
    assert unnamed == set(UNNAMED), (
        "name a new limit in a test that passes it; take a tested one out"
    )


@pytest.mark.parametrize("name", NAMED)
def test_it_says_all_of_itself(name: str) -> None:
    limit = NAMED[name]
    assert limit.value > 0
    assert limit.bounds.strip(" .") == limit.bounds
    assert limit.beyond.strip(" .") == limit.beyond
    assert "|" not in limit.bounds + limit.beyond


def test_no_two_limits_have_one_name() -> None:
    everywhere = [
        name
        for _, area in table.AREAS
        for name, found in vars(area).items()
        if isinstance(found, Limit)
    ]
    assert len(everywhere) == len(set(everywhere))
    assert {area.__name__.rpartition(".")[2] for _, area in table.AREAS} == {
        path.stem for path in TABLE.glob("*.py")
    } - {"__init__", "__main__", "limit", "table"}


def test_security_md_shows_the_table() -> None:
    text = (ROOT / ".github" / "SECURITY.md").read_text()
    [shown] = re.findall("<!-- limits -->\n(.*)\n<!-- end of limits -->", text, re.DOTALL)
    assert shown == table.markdown(), "run `python -m mlx_server.limits` and put its table in"


def test_a_setting_has_the_limit_as_its_default() -> None:
    settings = {limit.setting: limit.value for limit in NAMED.values() if limit.setting}
    assert {name: default_of(name) for name in settings} == settings


def default_of(setting: str) -> object:
    of_model = setting.startswith("models.*.")
    found: Any = ModelSettings(source="openai+http://127.0.0.1") if of_model else Settings()
    for name in setting.removeprefix("models.*.").split("."):
        assert isinstance(found, BaseModel)
        assert name in type(found).model_fields
        found = getattr(found, name)
    return found


def constants(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for found in (name for target in targets for name in ast.walk(target)):
                if isinstance(found, ast.Name):
                    yield found.id


def test_there_are_no_others() -> None:
    found = {
        f"{path.relative_to(PRODUCT).with_suffix('').as_posix()}.{name}"
        for path in modules(PRODUCT)
        for name in constants(path)
        if LIKE_A_LIMIT.match(name)
    }
    found = {place for place in found if "/bench/" not in place}
    assert found == set(OTHERS)


def test_no_form_of_a_request_has_a_limit_of_its_own() -> None:
    """`max_length=128` would be a limit that the table does not show."""
    own = [
        f"{path.relative_to(PRODUCT)}:{node.value.lineno}"
        for path in modules(PRODUCT / "api")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword)
        and node.arg == "max_length"
        and isinstance(node.value, ast.Constant)
    ]
    assert own == []


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (64 << 20, "bytes", "64 MiB"),
        (8_000_000_000, "bytes", "8 GB"),
        (100_000_001, "bytes", "100,000,001 bytes"),
        (10_000, "items", "10,000"),
        (5, "seconds", "5 seconds"),
    ],
)
def test_a_quantity_as_people_write_it(value: int, unit: Any, said: str) -> None:
    assert table.quantity(Limit("x", value, unit, "request", "400")) == said


def test_no_cache_by_an_argument_is_without_a_bound() -> None:
    unbounded = [
        f"{path.relative_to(PRODUCT)}: {node.name}"
        for path in modules(PRODUCT)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.args.args
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator in ("cache", "functools.cache") or "maxsize=None" in decorator
    ]
    assert unbounded == []
