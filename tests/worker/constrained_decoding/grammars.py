"""Grammars for the tiny model, and engines that know where they may end."""

import json
from pathlib import Path

from mlx_server.engine.messages import LoadModel, Report, RowFailed
from mlx_server.worker.engine import Engine
from tests.tiny import ENDOFTEXT, IM_END
from tests.worker.engine_runs import drain, of

ENDS = [ENDOFTEXT, IM_END]
HEAD = '%llguidance {"no_forcing": true}\n'
DIGITS = HEAD + "start: /[0-9]{3,9}/\n"
WORDS = HEAD + "start: (W S)* W\nW: /[a-z]{1,7}/\nS: /[ ,.]/\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["cat", "猫"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": r"\x20"},
}
JSON = f"{HEAD}start: j0\nj0: %json {json.dumps(SCHEMA)}\n"

GRAMMARS = (DIGITS, WORDS, JSON)


def loaded(
    path: Path, stops: list[int] = ENDS, concurrency: int = 8, cache_bytes: int = 0
) -> Engine:
    made = Engine(concurrency=concurrency, cache_bytes=cache_bytes)
    made.handle(LoadModel("tiny", str(path), stops))
    drain(made)
    return made


def refusals(reports: list[Report]) -> dict[int, str]:
    return _failures("InvalidGrammar", reports)


def turned_away(reports: list[Report]) -> dict[int, str]:
    return _failures("Overloaded", reports)


def _failures(error: str, reports: list[Report]) -> dict[int, str]:
    failed = [report for report in of(RowFailed, reports) if report.error == error]
    return {report.row: report.message for report in failed}
