"""The arguments of a process arrive as they were given, as one argument of its command line."""

import json
from typing import Any

import msgspec
import pytest

from mlx_server.engine.worker_arguments import (
    RankArguments,
    RankGroup,
    RankHost,
    WorkerArguments,
    decode_rank_arguments,
    decode_worker_arguments,
    encode_arguments,
)
from tests.structs import broken, filled

ALL = filled(WorkerArguments)


def test_each_field_arrives_as_it_was_given() -> None:
    defaults = msgspec.structs.asdict(WorkerArguments())
    given = msgspec.structs.asdict(ALL)
    assert not [name for name, value in defaults.items() if given[name] == value]
    assert decode_worker_arguments(encode_arguments(ALL)) == ALL


def test_another_rank_gets_those_of_rank_0_and_its_own() -> None:
    sent = RankArguments(3, RankGroup("tensor", (RankHost("a", ("10.0.0.1",)),)), ALL)
    assert decode_rank_arguments(encode_arguments(sent)) == sent


def test_they_fit_into_a_command_line() -> None:
    sent = encode_arguments(ALL)
    assert b"\0" not in sent
    assert b"\n" not in sent
    assert json.loads(sent)["wired"] == ALL.wired


def test_what_is_left_out_has_its_default() -> None:
    assert decode_worker_arguments(b"{}") == WorkerArguments()
    assert decode_worker_arguments(b'{"concurrency": 3}') == WorkerArguments(concurrency=3)


@pytest.mark.parametrize("missing", ["rank", "group", "worker"])
def test_a_rank_has_no_defaults(missing: str) -> None:
    sent = msgspec.to_builtins(filled(RankArguments))
    del sent[missing]
    with pytest.raises(msgspec.ValidationError, match=missing):
        decode_rank_arguments(encode_arguments(sent))


@pytest.mark.parametrize("sent", list(broken(ALL)))
def test_a_value_of_a_wrong_type_is_refused(sent: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_worker_arguments(encode_arguments(sent))


@pytest.mark.parametrize("sent", [b"", b"{", b"[]", b'{"concurrency": 1} 2'])
def test_what_are_no_arguments_is_refused(sent: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_worker_arguments(sent)
