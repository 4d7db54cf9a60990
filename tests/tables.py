"""Tables of cases in files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import TypeAdapter

from mlx_server.messages import Message

Test = TypeVar("Test", bound=Callable[..., object])


def cases(test: Test) -> Test:
    """Runs a test for its lines of the file that is named as its module. Each is a JSON object with
    the name of the `test`, its arguments and, where the arguments don't name it, the `case`."""
    lines = Path(test.__code__.co_filename).with_suffix(".jsonl").read_text("utf-8").split("\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    own = [row for row in rows if row.pop("test") == test.__name__]
    names = [row.pop("case", None) for row in own]
    values = [[row[argument] for argument in own[0]] for row in own]
    parametrized: Test = pytest.mark.parametrize(list(own[0]), values, ids=names)(test)
    return parametrized


messages_of = TypeAdapter(tuple[Message, ...]).validate_python
