"""Validates a value by its JSON Schema in a child process.

A schema can make validation take for ever (a pattern that backtracks, references that double at
every level), and only a process can be interrupted there.
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
    """The validation took too long, or the schema is invalid."""


def schema_errors(
    value: Any, schema: Any, seconds: float = limits.CHECK_SECONDS.value
) -> list[str]:
    """Returns the errors, each as "path: what". Blocks up to `seconds`; raises CheckFailed."""
    pair = json.dumps([value, schema]).encode()
    try:
        run = subprocess.run(
            [sys.executable, "-I", __file__], input=pair, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed("it takes too long") from None
    if run.returncode:
        raise CheckFailed("the schema can't be followed")
    found: list[str] = json.loads(run.stdout)
    return found


def schema_errors_now(value: Any, schema: Any) -> list[str]:
    """As `schema_errors`, in this process and without a time limit; raises jsonschema's errors."""
    validator = validator_for(schema, default=Draft202012Validator)
    # an empty registry keeps jsonschema from fetching references
    errors = validator(schema, registry=Registry()).iter_errors(value)
    deepest = (best_match([error]) for error in islice(errors, limits.CHECK_ERRORS.value))
    return sorted({_cut(f"{error.json_path}: {error.message}") for error in deepest if error})


def _cut(text: str) -> str:
    most = limits.CHECK_ERROR_CHARACTERS.value
    return text if len(text) <= most else f"{text[:most]}…"


def _main() -> None:
    import resource

    seconds = limits.CHECK_SECONDS.value * 4  # for when the parent has died and can't end us
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if sys.platform == "linux":  # macOS refuses to set RLIMIT_AS
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = limits.CHECK_BYTES.value
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    value, schema = json.load(sys.stdin)
    json.dump(schema_errors_now(value, schema), sys.stdout)


if __name__ == "__main__":
    _main()
