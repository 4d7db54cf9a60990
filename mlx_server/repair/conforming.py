"""Whether a value conforms to its JSON Schema, told by a process of its own.

A schema can make that take for ever (a pattern that backtracks, references that double at every
level), and nothing else in Python can be interrupted there.
"""

import json
import subprocess
import sys
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry

SECONDS = 5
MEMORY = 1 << 30
MOST_ERRORS = 8
LONGEST_ERROR = 300


class Unchecked(Exception):
    """Nothing could be found out in time, or the schema makes no sense."""


def conforms(value: Any, schema: Any, seconds: float = SECONDS) -> list[str]:
    """What does not, each as "path: what". Blocks until it is known; raises Unchecked."""
    asked = json.dumps([value, schema]).encode()
    try:
        run = subprocess.run(
            [sys.executable, "-I", __file__], input=asked, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise Unchecked("it takes too long") from None
    if run.returncode:
        raise Unchecked("the schema can't be followed")
    found: list[str] = json.loads(run.stdout)
    return found


def mistakes(value: Any, schema: Any) -> list[str]:
    """As `conforms`, here and now, however long it takes. Whatever it raises, raises."""
    validator = validator_for(schema, default=Draft202012Validator)
    # a registry of one's own has no way to fetch anything
    errors = validator(schema, registry=Registry()).iter_errors(value)
    deepest = (best_match([error]) for error in islice(errors, MOST_ERRORS))
    told = {_cut(f"{error.json_path}: {error.message}") for error in deepest if error}
    return sorted(told)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}…"


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS * 4, SECONDS * 4))  # whoever asked is gone
    if sys.platform == "linux":  # macOS has it, and refuses it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    value, schema = json.load(sys.stdin)
    json.dump(mistakes(value, schema), sys.stdout)


if __name__ == "__main__":
    _main()
