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

from mlx_server import limits


class CheckFailed(Exception):
    """Nothing could be found out in time, or the schema makes no sense."""


def schema_errors(
    value: Any, schema: Any, seconds: float = limits.CHECK_SECONDS.value
) -> list[str]:
    """What does not, each as "path: what". Blocks until it is known; raises Unchecked."""
    asked = json.dumps([value, schema]).encode()
    try:
        run = subprocess.run(
            [sys.executable, "-I", __file__], input=asked, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed("it takes too long") from None
    if run.returncode:
        raise CheckFailed("the schema can't be followed")
    found: list[str] = json.loads(run.stdout)
    return found


def schema_errors_now(value: Any, schema: Any) -> list[str]:
    """As `conforms`, here and now, however long it takes. Whatever it raises, raises."""
    validator = validator_for(schema, default=Draft202012Validator)
    # a registry of one's own has no way to fetch anything
    errors = validator(schema, registry=Registry()).iter_errors(value)
    deepest = (best_match([error]) for error in islice(errors, limits.CHECK_ERRORS.value))
    told = {_cut(f"{error.json_path}: {error.message}") for error in deepest if error}
    return sorted(told)


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= limits.CHECK_ERROR_CHARACTERS.value
        else f"{text[: limits.CHECK_ERROR_CHARACTERS.value]}…"
    )


def _main() -> None:
    import resource

    resource.setrlimit(
        resource.RLIMIT_CPU, (limits.CHECK_SECONDS.value * 4, limits.CHECK_SECONDS.value * 4)
    )  # whoever asked is gone
    if sys.platform == "linux":  # macOS has it, and refuses it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = limits.CHECK_BYTES.value
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    value, schema = json.load(sys.stdin)
    json.dump(schema_errors_now(value, schema), sys.stdout)


if __name__ == "__main__":
    _main()
