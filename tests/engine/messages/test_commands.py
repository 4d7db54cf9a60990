"""Commands arrive as they were sent, and a row's limit takes from its overflow tokens first."""

from typing import Any, get_args

import pytest

from mlx_server.engine import messages
from mlx_server.engine.messages import (
    Command,
    Embed,
    Generate,
    Grammar,
    LoadModel,
    Thinking,
    padded_tokens,
)
from mlx_server.requests import SamplingParams


def row(**more: Any) -> Generate:
    return Generate(1, "m", [5, 6], 10, [2], SamplingParams(), **more)


def test_every_command_has_a_tag_of_its_own() -> None:
    tags = [each.__struct_config__.tag for each in get_args(Command)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "command",
    [
        row(),
        row(
            grammar=Grammar("start: /\u00e9🙂/", (("j0", "true"),)),
            thinking=Thinking(None, True, [b"\xff[3]"], [b"</a>", b""], [], rest=Grammar("")),
            adapter="a" * 64,
            branches=[0, 2**31],
        ),
        Embed(2**40, "m", [[], [1]], scores=True),
        LoadModel("Salü 🙂", "/a b", kv_bits=8),
    ],
)
def test_it_arrives_as_it_was_sent(command: Command) -> None:
    assert messages.decode_commands(messages.encode_commands([command])) == [command]


@pytest.mark.parametrize(
    ("overflow", "tokens", "left", "overflow_left"),
    [(4, 10, 10, 4), (4, 99, 10, 4), (4, 8, 8, 2), (4, 6, 6, 0), (4, 1, 1, 0), (0, 3, 3, 0)],
)
def test_a_lower_limit_takes_from_the_overflow_tokens_first(
    overflow: int, tokens: int, left: int, overflow_left: int
) -> None:
    made = row(overflow_tokens=overflow)
    made.end_within(tokens)
    assert (made.max_tokens, made.overflow_tokens) == (left, overflow_left)


@pytest.mark.parametrize(
    ("inputs", "expected"), [([], 0), ([[]], 0), ([[1]], 1), ([[], [1, 2, 3], [1]], 9)]
)
def test_padding_counts(inputs: list[list[int]], expected: int) -> None:
    assert padded_tokens(inputs) == Embed(1, "m", inputs).length == expected
