"""`python -m conversations CLIENT`, with a Python that has the client: prints a line of JSON for
each conversation.

OPENAI_BASE_URL is the server's address, and DEMO the name of its real model, with which the
conversations run that a module names in ONCE.
"""

import importlib
import json
import os
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
            _report(packages, f"{name}, {family}", error)
    for name, talk in getattr(module, "ONCE", {}).items():
        _report(packages, name, _error(talk, os.environ["DEMO"]))


def _report(packages: str, name: str, error: str) -> None:
    sys.stdout.write(json.dumps({"client": packages, "name": name, "error": error}) + "\n")
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
