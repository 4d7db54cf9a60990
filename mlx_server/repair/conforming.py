"""Whether a value conforms to its JSON Schema.

A schema can make that take for ever (a pattern that backtracks, references that double at every
level), so the process that compiles schemas finds it out.
"""

import json
from typing import Any

from mlx_server import limits
from mlx_server.errors import CompilerUnavailable
from mlx_server.sandbox.parent import Stopped
from mlx_server.schemas.compiled import ask
from mlx_server.schemas.messages import Check, Checked


class CheckFailed(Exception):
    """Nothing could be found out in time, or the schema makes no sense."""


def schema_errors(
    value: Any, schema: Any, seconds: float = limits.CHECK_SECONDS.value
) -> list[str]:
    """What does not, each as "path: what". Blocks until it is known; raises Unchecked."""
    try:
        reply = ask(Check(json.dumps(value), json.dumps(schema), seconds))
    except (Stopped, CompilerUnavailable) as why:
        raise CheckFailed(str(why)) from None
    if not isinstance(reply, Checked):
        raise CheckFailed("the schema can't be followed")
    return reply.errors
