"""Fills the values of one server into the templates of a client's files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = "mlx-server"
"""The name of this server in the clients' files."""

CONTEXT, OUTPUT = "{context as a number}", "{output as a number}"
"""Placeholders that a number replaces, where `{context}` would give a string of its digits."""

PLACEHOLDER = re.compile(r"\{(?:url|key|model|context)\}")

ANSWER_SHARE = 4
"""An answer may take one part in this many of the context. Clients compact a conversation before it
fills the rest."""


@dataclass(frozen=True)
class Connection:
    """The values of one server in a client's settings."""

    url: str
    """The base URL without `/v1`."""
    key: str
    model: str
    context: int
    """The model's context length in tokens."""

    @property
    def output(self) -> int:
        return self.context // ANSWER_SHARE


def filled(template: Any, connection: Connection) -> Any:
    if isinstance(template, Mapping):
        return {
            filled(name, connection): filled(value, connection) for name, value in template.items()
        }
    if isinstance(template, list | tuple):
        return [filled(value, connection) for value in template]
    if template in (CONTEXT, OUTPUT):
        return connection.context if template == CONTEXT else connection.output
    if not isinstance(template, str):
        return template
    values = {
        "{url}": connection.url,
        "{key}": connection.key,
        "{model}": connection.model,
        "{context}": str(connection.context),
    }
    # in one pass: a value may contain a placeholder's text
    return PLACEHOLDER.sub(lambda found: values[found[0]], template)
