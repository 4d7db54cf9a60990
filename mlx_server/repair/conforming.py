"""Validates a value by its JSON Schema.

A schema can make validation take for ever (a pattern that backtracks, references that double at
every level), so the process that compiles schemas does it.
"""

import json
from typing import Any

from mlx_server import limits
from mlx_server.errors import CompilerUnavailable
from mlx_server.sandbox.parent import Stopped
from mlx_server.schemas.compiled import ask
from mlx_server.schemas.messages import CheckedValue, CheckValue


class CheckFailed(Exception):
    """The validation took too long, or the schema is invalid."""


def schema_errors(value: Any, schema: Any, seconds: float = limits.CHECK_SECONDS) -> list[str]:
    """Returns the errors, each as "path: what". Blocks up to `seconds`; raises CheckFailed."""
    try:
        reply = ask(CheckValue(json.dumps(value), json.dumps(schema), seconds))
    except (Stopped, CompilerUnavailable) as why:
        raise CheckFailed(str(why)) from None
    if not isinstance(reply, CheckedValue):
        raise CheckFailed("the schema can't be followed")
    return reply.errors
