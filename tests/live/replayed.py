"""A replay model for the tests of responses: some answers are quick, some take their time."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.live.common import Models, common_models
from tests.live.server import LiveServer, serving

MODEL = "fake"
LONG = "No end. " * 400
ENTRIES: list[dict[str, Any]] = [
    {"match": "poem", "output": "Roses are red."},
    {"match": "slow", "output": LONG, "delay_ms": 20},
    {"match": "steady", "output": "One, two, three, four.", "delay_ms": 40},
    {"match": "sum up", "output": "They talked."},
    {"match": "regex:too long", "output": "A summary."},
    {"match": "regex:.", "output": "Yes."},
]


@common_models
def models(folder: Path, _: object) -> Models:
    write(folder)
    models: Models = config()["models"]
    return models


@contextmanager
def replaying(folder: Path, **more: Mapping[str, Any]) -> Iterator[LiveServer]:
    write(folder)
    with serving(folder, config(**more)) as server:
        yield server


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(entry) for entry in ENTRIES)
    (folder / "said.jsonl").write_text(lines, "utf-8")


def config(others: Mapping[str, Any] | None = None, **more: Mapping[str, Any]) -> dict[str, Any]:
    """others: models, next to MODEL."""
    model = {"source": "replay:said.jsonl", "family": "plain"}
    return {"models": {MODEL: model, **(others or {})}, **more}


def ask(client: OpenAI, text: Any = "poem", **more: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": text, **more})


def refused(status: int) -> Any:
    kinds = {400: openai.BadRequestError, 404: openai.NotFoundError, 503: openai.APIStatusError}
    return pytest.raises(kinds[status])


def is_begun(response: Response) -> bool:
    return 0 < len(response.output_text) < len(LONG) and LONG.startswith(response.output_text)
