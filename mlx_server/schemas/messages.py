"""The messages between the server and the process that compiles schemas."""

import msgspec


class Compile(msgspec.Struct, array_like=True, tag=True):
    schema: str
    """As JSON."""
    seconds: float
    """Of processor time; four times as much of the clock."""


class Convert(msgspec.Struct, array_like=True, tag=True):
    gbnf: str
    seconds: float


class CheckValue(msgspec.Struct, array_like=True, tag=True):
    value: str
    """As JSON, like its schema."""
    schema: str
    seconds: float


class Compiled(msgspec.Struct, array_like=True, tag=True):
    grammar: str
    """The body of a rule in llguidance's Lark."""
    gaps: list[tuple[tuple[str, ...], str, str]] = []
    """Path, keyword and reason of what is not enforced."""


class Refused(msgspec.Struct, array_like=True, tag=True):
    message: str


class CheckedValue(msgspec.Struct, array_like=True, tag=True):
    errors: list[str]
    """What does not conform to the schema, each as "path: what"."""


Request = Compile | Convert | CheckValue
Reply = Compiled | CheckedValue | Refused
