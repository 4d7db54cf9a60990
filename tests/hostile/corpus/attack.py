"""What an attack is: what is sent, and what has to come of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, cast

from tests.hostile.corpus.making import joined

Json = dict[str, Any]
Step = int | str
"""A status, or `closes`."""
Pieces = str | bytes | Sequence[str | bytes]


@dataclass(frozen=True)
class Target:
    """What of a server attacks need to know."""

    model: str
    head: int
    """One more than the largest id that the model can produce."""
    tokens: int
    """One more than the largest that has a text."""


@dataclass(frozen=True)
class Expected:
    steps: tuple[frozenset[Step], ...]
    """One after another, each one of a few."""
    error: Mapping[str, str | None]
    """Of `type`, `code` and `param`, what matters."""

    @classmethod
    def read(cls, line: str | int) -> "Expected":
        words = str(line).split()
        pairs = [word.partition("=") for word in words if "=" in word]
        error = {name: None if value == "null" else value for name, _, value in pairs}
        steps = " ".join(word for word in words if "=" not in word).split(" then ")
        return cls(tuple(each for text in steps for each in _steps(text)), error)


def _steps(text: str) -> list[frozenset[Step]]:
    few, _, times = text.partition("*")
    step = frozenset(int(one) if one.isdecimal() else one for one in few.split("|"))
    return [step] * int(times or 1)


@dataclass(frozen=True)
class Call:
    """A request as a client's library sends it."""

    path: str
    body: Mapping[str, Any] | bytes | None
    raw: Mapping[str, str] = field(default_factory=dict)
    """Members of the body by their JSON text, in place of others of their names."""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> bytes:
        if not isinstance(self.body, Mapping):
            return self.body or b""
        # with NaN, and with half a surrogate pair as its escape
        written = {name: json.dumps(value) for name, value in self.body.items()} | dict(self.raw)
        members = (f"{json.dumps(name)}: {value}" for name, value in written.items())
        return f"{{{', '.join(members)}}}".encode()


@dataclass(frozen=True)
class Bytes:
    """What goes over a socket."""

    said: bytes
    then: bytes = b""
    """After the first answer."""
    drip: bytes = b""
    """After all, again and again."""


@dataclass(frozen=True)
class Attack:
    category: str
    name: str
    sent: Call | Bytes
    expected: Expected
    everywhere: bool
    """Whether any server of the OpenAI API should refuse it or answer."""

    def __str__(self) -> str:
        return f"{self.category}: {self.name}"


class Sent(TypedDict, total=False):
    """What is sent; corpus/README.md tells of each."""

    to: str
    body: Json
    set: Json
    raw: dict[str, str]
    bytes: str | bytes
    method: str
    headers: dict[str, str]
    send: Pieces
    then: Pieces
    drip: Pieces
    everywhere: bool


class Case(Sent, total=False):
    expect: str | int


def case(expect: str | int | None = None, **sent: Unpack[Sent]) -> Case:
    """An attack, or what all attacks of a group have in common."""
    found = cast("Case", dict(sent))
    if expect is not None:
        found["expect"] = expect
    return found


@dataclass(frozen=True)
class Group:
    shared: Case
    """What an attack does not say itself."""
    attacks: Mapping[str, Case] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    """The JSON texts of values, by their names."""
    parameters: Mapping[str, Sequence[str | int | None]] = field(default_factory=dict)
    """What is to be expected of a parameter at each of the values; None leaves one out."""

    def all(self, category: str) -> Iterator[Attack]:
        for name, own in {**self.attacks, **self._tabled()}.items():
            asked: Case = {**self.shared, **own}
            expected, everywhere = Expected.read(asked["expect"]), asked.get("everywhere", True)
            yield Attack(category, name, _sent(asked), expected, everywhere)

    def _tabled(self) -> dict[str, Case]:
        """Every parameter at every value."""
        found = {}
        for parameter, row in self.parameters.items():
            for (value, text), expected in zip(self.values.items(), row, strict=True):
                if expected is None:
                    continue
                # where the body is not JSON at all, no parameter is named
                param = f" param={parameter}" if expected == 400 and value != "NaN" else ""
                found[f"{parameter} is {value}"] = case(f"{expected}{param}", raw={parameter: text})
        return found


def _sent(asked: Case) -> Call | Bytes:
    if "send" in asked:
        return Bytes(
            joined(asked["send"]), joined(asked.get("then", "")), joined(asked.get("drip", ""))
        )
    method = asked.get("method", "POST")
    body: Json | bytes | None = {**asked.get("body", {}), **asked.get("set", {})}
    if "bytes" in asked:
        body = joined(asked["bytes"])
    return Call(
        path=asked["to"],
        body=body if method == "POST" else None,
        raw=asked.get("raw", {}),
        method=method,
        headers={"content-type": "application/json", **asked.get("headers", {})},
    )
