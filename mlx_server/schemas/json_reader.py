"""Reads JSON that is being written by its schemas, and says which texts would end it.

The text is read once, as JSON; what the schemas say of it is kept in threads. A thread is one
reading: where a schema has alternatives, each goes on in a thread of its own, until a type, a
constant or a name shows that it is not meant. After `{"name":"An` an object that requires `name`
and `age` has the ending `","age":0}`.

The text around the JSON, such as the delimiters of a call, is passed over: any object in it may be
one of the schemas' instances. Endings are proposals, to be checked by the grammar's matcher.
"""

import json
import re
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

from mlx_server.schemas.instances import (
    Instances,
    Parts,
    compact,
    constants_of,
    item_of,
    member_of,
    names_of,
    string_endings,
    types_of,
)
from mlx_server.schemas.number_endings import number_endings
from mlx_server.schemas.types import type_of

MOST_THREADS = 256
MOST_NESTED = 3
"""The brackets around a call's arguments, in which they are looked for."""
MOST_NAMES = 16
"""The most names of further members that are proposed in one place."""

LONGEST_ESCAPES = 64
"""The characters at the end of a string in which an escape is looked for that has begun."""

_PLAIN = re.compile(rb'[^"\\]+')
_SCALAR = re.compile(rb"[-+.0-9a-zA-Z]+")
_BEGIN = re.compile(rb"[{\[]")
_ESCAPE = re.compile(rb"(?<!\\)(?>\\\\)*+\\(u[0-9a-fA-F]{0,3})?$")
_SPACE = b" \t\r\n"
_WORDS = ("null", "true", "false")


class _Object(NamedTuple):
    """An object that is open."""

    instances: Instances
    parts: Parts
    names: tuple[str, ...]
    around: "_Open | None"


class _Array(NamedTuple):
    instances: Instances
    parts: Parts
    size: int
    around: "_Open | None"


_Open = _Object | _Array


class _Thread(NamedTuple):
    instances: Instances
    open: _Open | None
    """The innermost bracket that is open."""
    schemas: Sequence[Any] = ()
    """The schemas of the value that is expected or being read."""


class JsonReader:
    """Its fields are never changed in place, so that a copy may go its own way."""

    def __init__(self, schemas: Sequence[Instances], *, is_framed: bool) -> None:
        """is_framed: whether there may be text around the JSON."""
        self._schemas, self._is_framed = schemas, is_framed
        self._brackets = b""
        """The brackets that are open."""
        self._state = "text" if is_framed else "begin"
        self._raw = b""
        """The text of the string, number or word that is being read."""
        self._threads: tuple[_Thread, ...] = ()

    def after(self, text: bytes) -> "JsonReader":
        reader = copy(self)
        reader.read(text)
        return reader

    def read(self, text: bytes) -> None:
        at = 0
        while at < len(text):
            at = self._step(text, at)

    def pass_delimiter(self) -> None:
        """Reads a control token, after which JSON may begin."""
        self._leave()
        self._state = "begin"

    @property
    def is_ended(self) -> bool:
        """Whether a whole instance was read, and no other one has begun."""
        return any(map(_is_done, self._threads))

    @property
    def is_inside(self) -> bool:
        """Whether JSON is read, or what comes between it and the end of the answer."""
        return bool(self._threads) or self._state == "begin"

    @property
    def missing_bytes(self) -> int:
        """The bytes that the last character of a string lacks."""
        return missing_bytes(self._raw[-4:]) if self._state in ("string", "name") else 0

    @property
    def reads_free_text(self) -> bool:
        """Whether a string is read that may have any characters."""
        if self._state == "name":
            opens = [thread.open for thread in self._threads]
            return any(isinstance(one, _Object) and _takes_any(one) for one in opens)
        return self._state == "string" and any(
            "string" in types_of(parts) and constants_of(parts) is None and _is_free(parts)
            for thread in self._threads
            for parts in thread.instances.alternatives(thread.schemas)
        )

    @property
    def _awaits_root(self) -> bool:
        is_next = self._state == "value" and self._brackets == b"[" and self._is_framed
        return self._state == "begin" or (is_next and all(map(_is_done, self._threads)))

    def endings(self) -> Iterator[str]:
        """Yields texts that may end the JSON here."""
        is_between = self._state in ("after", "text")
        for thread in self._roots() if self._awaits_root else self._threads:
            rests: dict[int, str | None] = {}
            for text, opened in self._values(thread) if is_between or not _is_done(thread) else ():
                if id(opened) not in rests:
                    rests[id(opened)] = _closed(opened)
                if (rest := rests[id(opened)]) is not None:
                    yield text + rest

    # how the text is read

    def _step(self, text: bytes, at: int) -> int:
        """Reads the next characters; returns the place after them."""
        if self._state in ("string", "name"):
            return self._read_string(text, at)
        if self._state == "scalar":
            if scalar := _SCALAR.match(text, at):
                self._raw += scalar[0]
                return scalar.end()
            self._end_scalar()
            return at
        if self._state == "text":
            begin = _BEGIN.search(text, at)
            if not begin:
                return len(text)
            self._state = "begin"
            return begin.start()
        byte = text[at : at + 1]
        if byte not in _SPACE and not self._is_read(byte):
            self._leave()
        return at + 1

    def _is_read(self, byte: bytes) -> bool:
        """Reads a character outside of strings. Returns False if it is no JSON."""
        state = self._state
        if state in ("value", "item", "begin") and (byte in b'{["-' or byte.isalnum()):
            return self._begin_value(byte)
        if byte == b"]" and state in ("item", "after") and self._brackets[-1:] == b"[":
            return self._close()
        if byte == b"}" and state in ("member", "after") and self._brackets[-1:] == b"{":
            return self._close()
        if byte == b'"' and state in ("member", "next"):
            self._state, self._raw = "name", b""
            return True
        if byte == b":" and state == "colon":
            self._state = "value"
            return True
        if byte == b"," and state == "after" and self._brackets:
            self._state = "next" if self._brackets[-1:] == b"{" else "value"
            self._threads = tuple(map(_after_comma, self._threads))
            return True
        return False

    def _leave(self) -> None:
        """What was read is no JSON, or the text around it."""
        self._brackets, self._raw, self._state = b"", b"", "text"
        self._threads = tuple(filter(_is_done, self._threads))

    def _begin_value(self, byte: bytes) -> bool:
        if self._state == "begin":
            self._threads = self._roots()
        elif self._state == "item":
            self._threads = tuple(_with_item(thread) for thread in self._threads)
        if (
            self._brackets
            and self._is_framed
            and byte == b"{"
            and len(self._brackets) < MOST_NESTED
        ):
            self._threads += self._roots()
        if byte == b'"':
            self._state, self._raw = "string", b""
        elif byte in b"{[":
            self._brackets += byte
            self._state = "member" if byte == b"{" else "item"
            opened = (one for thread in self._threads for one in _opened(thread, byte))
            self._threads = tuple(islice(opened, MOST_THREADS))
        else:
            self._state, self._raw = "scalar", byte
        return True

    def _roots(self) -> tuple[_Thread, ...]:
        return tuple(_Thread(instances, None, (instances.start,)) for instances in self._schemas)

    def _close(self) -> bool:
        self._brackets = self._brackets[:-1]
        self._threads = tuple(_Thread(t.instances, t.open and t.open.around) for t in self._threads)
        self._state = "after" if self._brackets else "text"
        return True

    def _read_string(self, text: bytes, at: int) -> int:
        if plain := _PLAIN.match(text, at):
            self._raw += plain[0]
            return plain.end()
        if text[at : at + 1] == b"\\" or _escape_of(self._raw):
            self._raw += text[at : at + 1]
        elif self._state == "name":
            name = _decoded(self._raw)
            named = (_with_name(thread, name) for thread in self._threads)
            self._threads = tuple(thread for thread in named if thread)
            self._state, self._raw = "colon", b""
        else:
            self._end_value(_decoded(self._raw))
        return at + 1

    def _end_scalar(self) -> None:
        try:
            self._end_value(json.loads(self._raw))
        except ValueError:
            self._leave()

    def _end_value(self, value: Any) -> None:
        taken = (thread for thread in self._threads if _takes(thread, value))
        self._threads = tuple(_Thread(thread.instances, thread.open) for thread in taken)
        self._state, self._raw = "after" if self._brackets else "text", b""

    # how it may end

    def _values(self, thread: _Thread) -> Iterator[tuple[str, _Open | None]]:
        """Yields texts that end what the thread is reading, and the bracket that is open then."""
        instances, opened = thread.instances, thread.open
        match self._state:
            case "after" | "text":
                yield "", opened
            case "string":
                for parts in instances.alternatives(thread.schemas):
                    yield from ((text, opened) for text in self._string_endings(parts))
            case "scalar":
                for parts in instances.alternatives(thread.schemas):
                    yield from ((text, opened) for text in self._scalar_endings(parts))
            case "value" | "begin":
                if (value := instances.text(thread.schemas)) is not None:
                    yield value, opened
            case "colon":
                if (value := instances.text(thread.schemas)) is not None:
                    yield f":{value}", opened
            case "member" | "item" if opened:
                text = _closed(opened)
                if text is not None:
                    yield text.removeprefix(","), None
            case "next" if isinstance(opened, _Object):
                yield from _further(opened)
            case "name" if isinstance(opened, _Object):
                yield from self._names(opened)

    def _string_endings(self, parts: Parts) -> Iterator[str]:
        if "string" not in types_of(parts):
            return
        if (constants := constants_of(parts)) is not None:
            texts = (compact(constant)[1:] for constant in constants if isinstance(constant, str))
            begun = self._raw.decode("utf-8", "ignore")
            yield from (text[len(begun) :] for text in texts if text.startswith(begun))
        else:
            rest = self._rest_of_escape()
            begun = "" if _is_plain(parts) else _decoded(self._raw)
            yield from (rest + text for text in string_endings(parts, begun))

    def _scalar_endings(self, parts: Parts) -> Iterator[str]:
        begun, types = self._raw.decode(), types_of(parts)
        if (constants := constants_of(parts)) is not None:
            words = [compact(constant) for constant in constants]
        else:
            words = [*_WORDS[: "null" in types], *_WORDS[1:][: 2 * ("boolean" in types)]]
            if "number" in types or "integer" in types:
                yield from number_endings(parts, begun, whole="number" not in types)
        yield from (word[len(begun) :] for word in words if word.startswith(begun))

    def _names(self, opened: _Object) -> Iterator[tuple[str, _Open]]:
        begun = self._raw.decode("utf-8", "ignore")
        for name, whole in ((name, compact(name)[1:]) for name in _unused(opened)):
            if whole.startswith(begun):
                yield from _member(opened, name, whole[len(begun) :])
        if _takes_any(opened):
            yield from _member(opened, _decoded(self._raw), self._rest_of_escape() + '"')

    def _rest_of_escape(self) -> str:
        escape = _escape_of(self._raw)
        if not escape:
            return ""
        return "0" * (5 - len(escape[1])) if escape[1] else "n"


def _escape_of(raw: bytes) -> re.Match[bytes] | None:
    """Returns the escape that a string's text ends within."""
    return _ESCAPE.search(raw[-LONGEST_ESCAPES:])


def _decoded(raw: bytes) -> str:
    """Returns the string, also where it has not ended yet."""
    text = _ESCAPE.sub(b"", raw).decode("utf-8", "ignore")
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _opened(thread: _Thread, byte: bytes) -> Iterator[_Thread]:
    if _is_done(thread):
        return
    for parts in thread.instances.alternatives(thread.schemas):
        if constants_of(parts) is None and byte == b"{" and "object" in types_of(parts):
            yield _Thread(thread.instances, _Object(thread.instances, parts, (), thread.open))
        elif constants_of(parts) is None and byte == b"[" and "array" in types_of(parts):
            array = _Array(thread.instances, parts, 0, thread.open)
            yield _Thread(thread.instances, array, item_of(parts, 0))


def _with_item(thread: _Thread) -> _Thread:
    """The thread with one more item in its innermost array."""
    if not isinstance(thread.open, _Array):
        return thread
    return thread._replace(open=thread.open._replace(size=thread.open.size + 1))


def _after_comma(thread: _Thread) -> _Thread:
    if not isinstance(thread.open, _Array):
        return thread
    return _with_item(thread)._replace(schemas=item_of(thread.open.parts, thread.open.size))


def _is_done(thread: _Thread) -> bool:
    """Whether the thread has read its whole instance."""
    return thread.open is None and not thread.schemas


def _with_name(thread: _Thread, name: str) -> _Thread | None:
    opened = thread.open
    if _is_done(thread):
        return thread
    if not isinstance(opened, _Object):
        return None
    schemas = member_of(opened.parts, name)
    if any(schema is False for schema in schemas) or name in opened.names:
        return None
    return _Thread(thread.instances, opened._replace(names=(*opened.names, name)), schemas)


def _takes(thread: _Thread, value: Any) -> bool:
    """Whether the value may be the one that the thread expects, by its type and constants."""
    if _is_done(thread):
        return True
    for parts in thread.instances.alternatives(thread.schemas):
        constants = constants_of(parts)
        if type_of(value) in types_of(parts) and (constants is None or value in constants):
            return True
    return False


def _is_free(parts: Parts) -> bool:
    return not any("pattern" in part or "format" in part for part in parts)


def _is_plain(parts: Parts) -> bool:
    """Whether a string may end after any character."""
    return _is_free(parts) and not any("minLength" in part for part in parts)


def _takes_any(opened: _Object) -> bool:
    return not any(False in member_of((part,), "\0") for part in opened.parts)


def _unused(opened: _Object) -> list[str]:
    """Returns the names of the members that may follow: they have to be in the schema's order."""
    names = names_of(opened.parts)
    used = [names.index(name) for name in opened.names if name in names]
    later = names[max(used, default=-1) + 1 :]
    required = (name for part in opened.parts for name in part.get("required", ()))
    return later + [name for name in required if name not in (*names, *opened.names)]


def _further(opened: _Object) -> Iterator[tuple[str, _Open]]:
    """Yields a member that follows a comma, and the object with it."""
    required = {name for part in opened.parts for name in part.get("required", ())}
    names = _unused(opened)
    missing = [name for name in names if name in required]
    for name in (*missing[:1], *names[:MOST_NAMES]):
        yield from _member(opened, name, compact(name))
    if _takes_any(opened):
        yield from _member(opened, "", '""')


def _member(opened: _Object, name: str, text: str) -> Iterator[tuple[str, _Open]]:
    """Yields the text of the name with the member's value."""
    value = opened.instances.text(member_of(opened.parts, name))
    if value is not None:
        yield f"{text}:{value}", opened._replace(names=(*opened.names, name))


def _closed(opened: _Open | None) -> str | None:
    """Returns what closes all brackets after a whole value."""
    text = ""
    while opened is not None:
        if isinstance(opened, _Object):
            more, end = opened.instances.more_members(opened.parts, opened.names), "}"
        else:
            more, end = opened.instances.more_items(opened.parts, opened.size), "]"
        if more is None:
            return None
        text += more + end
        opened = opened.around
    return text


def missing_bytes(text: bytes) -> int:
    """Returns how many bytes of the last character of a UTF-8 text are missing."""
    for have, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return max(0, 2 + (byte >= 0xE0) + (byte >= 0xF0) - have)
        if byte < 0x80:
            return 0
    return 0
