"""Messages with a value of its own in each field, to see that what is sent arrives."""

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import ModuleType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

S = TypeVar("S")


def structs_of(module: ModuleType) -> list[type[msgspec.Struct]]:
    """The messages that a module defines."""
    found = [each for _, each in inspect.getmembers(module, inspect.isclass)]
    return [
        each
        for each in found
        if issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    ]


def tagged(module: ModuleType) -> set[type[msgspec.Struct]]:
    """Those of them that are sent by themselves, not as a part of another one."""
    return {each for each in structs_of(module) if each.__struct_config__.tag is not None}


def filled(message: type[S], seed: int = 2) -> S:
    """A message in which no field has its default."""
    hints = get_type_hints(message)
    values = {name: value_of(hint, seed + at) for at, (name, hint) in enumerate(hints.items())}
    made: Any = message(**values)
    assert not is_dataclass(message) or made != message()
    return cast(S, made)


def value_of(hint: Any, seed: int) -> Any:
    """Any value of the type, which another seed changes."""
    given = get_args(hint)
    match get_origin(hint) or hint:
        case origin if origin is Literal:
            return given[seed % len(given)]
        case origin if origin in (Union, UnionType):
            return value_of(given[0], seed)
        case origin if origin is list:
            return [value_of(given[0], seed), value_of(given[0], seed + 1)]
        case origin if origin is tuple:
            items = given[:1] if given[-1] is Ellipsis else given
            return tuple(value_of(each, seed + at) for at, each in enumerate(items))
        case origin if origin is dict:
            key, value = given or (str, Any)
            member: Any = [seed, None, "ü"] if value is Any else value_of(value, seed)
            return {value_of(key, seed): member}
        case plain if plain in (int, float, str, bytes, bool):
            return {
                int: 2**40 + seed,
                float: seed + 0.5,
                str: f"Salü 🙂 \n{seed}",
                bytes: b"\xff\0%d" % seed,
                bool: True,
            }[plain]
        case message:
            return filled(message, seed)


def broken(message: msgspec.Struct) -> Iterator[Any]:
    """What is sent for a message, with a value of a wrong type in each field in turn."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    has_tag = message.__struct_config__.tag is not None
    if isinstance(sent, dict):
        for name in message.__struct_fields__:
            yield {**sent, name: [[]]}
    else:
        for at in range(has_tag, len(sent)):
            yield [*sent[:at], [[]], *sent[at + 1 :]]
