"""The messages between the server and the process that compiles schemas."""

import msgspec


class Compile(msgspec.Struct, array_like=True, tag=True):
    schema: str
    """The schema as JSON."""
    seconds: float
    """Limit on processor time; four times as much wall-clock time is allowed."""


class ConvertGbnf(msgspec.Struct, array_like=True, tag=True):
    gbnf: str
    seconds: float


class CheckValue(msgspec.Struct, array_like=True, tag=True):
    value: str
    """The value as JSON; the schema is JSON too."""
    schema: str
    seconds: float


class Compiled(msgspec.Struct, array_like=True, tag=True):
    grammar: str
    """The schema as llguidance gets it, or a grammar in Lark."""
    unsupported: list[tuple[tuple[str, ...], str, str]] = []
    """The path, keyword and reason of each unsupported keyword."""


class SchemaRefused(msgspec.Struct, array_like=True, tag=True):
    message: str


class CheckedValue(msgspec.Struct, array_like=True, tag=True):
    errors: list[str]
    """The violations of the schema, each as "path: message"."""


Request = Compile | ConvertGbnf | CheckValue
Reply = Compiled | CheckedValue | SchemaRefused
