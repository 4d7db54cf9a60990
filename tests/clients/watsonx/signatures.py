"""The signatures of IBM's `ModelInference`, as recorded in signatures.json.

`python -m tests.clients.watsonx.signatures` records them again, where IBM's package is installed.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")

METHODS = (
    *("__init__", "chat", "chat_stream", "achat", "achat_stream"),
    *("generate_text", "generate_text_stream"),
)

Parameters = list[list[str]]
"""The name and the kind of each parameter, and its default."""


def signatures(kind: Any) -> dict[str, Parameters]:
    return {name: _parameters(getattr(kind, name)) for name in METHODS}


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def _parameters(method: Any) -> Parameters:
    found = list(inspect.signature(method).parameters.values())[1:]
    return [[each.name, each.kind.name, _default(each.default)] for each in found]


def _default(value: Any) -> str:
    return "" if value is inspect.Parameter.empty else repr(value)


def main() -> None:
    package = importlib.import_module("ibm_watsonx_ai")
    vendors = importlib.import_module("ibm_watsonx_ai.foundation_models").ModelInference
    table = {"version": package.__version__, "methods": signatures(vendors)}
    FILE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
