"""`python -m conversations CLIENT`, by a Python that has it: a line of JSON for each conversation.

OPENAI_BASE_URL says where the server is.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

from conversations.weather import FAMILIES, MOST, model_of


def main(client: str) -> None:
    module = importlib.import_module(f"conversations.with_{client}")
    packages = " ".join(f"{name}@{version(name)}" for name in module.PACKAGES)
    conversations = list(module.conversations())
    assert len(conversations) <= MOST
    for number, (name, talk) in enumerate(conversations):
        for family in FAMILIES:
            error = _error(talk, model_of(family, client, number))
            reported = {"client": packages, "name": f"{name}, {family}", "error": error}
            sys.stdout.write(json.dumps(reported) + "\n")
            sys.stdout.flush()


def _error(talk: Callable[[str], None], model: str) -> str:
    try:
        talk(model)
    except Exception as error:
        sys.stderr.write(f"\n== {model}\n")
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
