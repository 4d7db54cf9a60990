"""What completes a grammar is the same in every process, though each orders its sets otherwise."""

import os
import subprocess
import sys

import pytest

PRINTED = r"""
from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.completion_proposals import proposals_of
from mlx_server.worker.constrained_decoding.token_classes import TokenClasses

texts = [bytes([byte]) for byte in range(256)]
classes = TokenClasses([*texts, b"<a>", b"<b>", b"<end>"], [258], [256, 257])
lark = Lark()
schema = {"enum": ["one", "two", "six"], "pattern": "^(ab|cd|ef)+$"}
thought, answer = "(<[256]> /(xy|yz|zx)+/ <[257]>)?", '("ab" | "cd" | "ef")'
found = proposals_of(lark.source(f"{thought} {answer} {lark.json(schema)}"), classes)
texts = (
    found.values, found.required, found.following, found.members, found.tails
)
print(found.own, found.growth, found.reserve)
print(list(found.endings.after_control()), list(found.endings.without(frozenset())))
print([one.without(frozenset()) for one in texts])
"""


def _printed(seed: str) -> str:
    """The proposals that a process makes whose sets are ordered by this seed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PRINTED]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def printed() -> str:
    return _printed("0")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_proposes_the_same_in_the_same_order(printed: str, seed: str) -> None:
    assert len(printed) > 500
    assert _printed(seed) == printed
