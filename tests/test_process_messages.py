"""Messages between our processes arrive as they were sent, and nothing else is taken for one."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import ModuleType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import pytest

from mlx_server.engine import messages, worker_arguments
from mlx_server.engine.messages import Admitted, Command, Report, RowFailed, Token
from mlx_server.engine.worker_arguments import RankArguments, WorkerArguments, encode_arguments
from mlx_server.grammars import compiled as schemas
from mlx_server.system.sandbox import files, picture_recipes
from mlx_server.system.sandbox import template_messages as templates
from mlx_server.worker.ranks import link

S = TypeVar("S")


def tagged(module: ModuleType) -> set[type[msgspec.Struct]]:
    """The messages of a module that are sent by themselves, not as a part of another one."""
    own = [each for _, each in inspect.getmembers(module, inspect.isclass)]
    own = [each for each in own if each.__module__ == module.__name__]
    return {
        each
        for each in own
        if issubclass(each, msgspec.Struct) and each.__struct_config__.tag is not None
    }


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


UNIONS: Mapping[str, tuple[ModuleType, Any]] = {
    "engine": (messages, Report),
    "rank": (link, link.RankReport),
    "template": (templates, templates.RenderTemplate),
    "rendered": (templates, templates.TemplateReply),
    "PDF": (files, files.ReadPdf),
    "picture": (files, files.ReadPicture),
    "recipe": (picture_recipes, picture_recipes.PictureRecipe),
    "file": (files, files.FileReply),
    "schema": (schemas, schemas.Request),
    "compiled": (schemas, schemas.Reply),
    "worker's arguments": (worker_arguments, WorkerArguments),
    "rank's arguments": (worker_arguments, RankArguments),
}
CASES = [
    (name, message) for name, (_, union) in UNIONS.items() for message in get_args(union) or [union]
]


def decoded(name: str, sent: Any) -> Any:
    union = UNIONS[name][1]
    if name.endswith("arguments"):
        return msgspec.json.decode(encode_arguments(sent), type=union)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=union)


@pytest.mark.parametrize(("name", "message"), CASES)
def test_a_message_arrives_as_it_was_sent(name: str, message: Any) -> None:
    sent = filled(message)
    arrived = decoded(name, sent)
    assert type(arrived) is message
    assert arrived == sent


@pytest.mark.parametrize(("name", "message"), CASES)
def test_a_field_of_a_wrong_type_is_refused(name: str, message: Any) -> None:
    for sent in broken(filled(message)):
        with pytest.raises(msgspec.ValidationError):
            decoded(name, sent)


def test_every_message_that_has_a_tag_is_read_by_its_receiver() -> None:
    for module in {module for module, _ in UNIONS.values()}:
        unions = [union for each, union in UNIONS.values() if each is module]
        read = {each for union in unions for each in get_args(union) or [union]}
        assert tagged(module) <= read | {*get_args(Command)}


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (templates.RenderTemplate, "rendered"),
        (files.ReadPdf, "file"),
        (files.ReadPicture, "file"),
        (schemas.Request, "compiled"),
    ],
)
def test_a_request_is_no_reply(request_: Any, reply: str) -> None:
    for message in get_args(request_) or [request_]:
        with pytest.raises(msgspec.ValidationError):
            decoded(reply, filled(message))


def test_a_frame_has_its_reports_in_their_order_or_none() -> None:
    sent = [filled(each) for each in get_args(Report)]
    assert messages.decode_reports(messages.encode_reports(sent)) == sent
    payload = messages.encode_reports([RowFailed(1, "no"), Admitted(2)])
    for end in range(len(payload)):
        with pytest.raises(msgspec.DecodeError):
            messages.decode_reports(payload[:end])
    assert len(messages.encode_reports(Token(1, 2))) <= 7, "most of what is sent are tokens"


def test_arguments_fit_into_a_command_line_and_have_their_defaults() -> None:
    sent = encode_arguments(filled(WorkerArguments))
    assert not {b"\0", b"\n"} & {sent[at : at + 1] for at in range(len(sent))}
    decode = worker_arguments.decode_worker_arguments
    assert decode(b'{"concurrency": 3}') == WorkerArguments(concurrency=3)
    for wrong in (b"", b"{", b"[]", b'{"concurrency": 1} 2'):
        with pytest.raises(msgspec.DecodeError):
            decode(wrong)
