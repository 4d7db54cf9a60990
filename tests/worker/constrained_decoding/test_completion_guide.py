"""What completes a grammar is the same in every process, though each orders its sets otherwise."""

import os
import subprocess
import sys

import pytest

GUIDE = r"""
from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.completion_guide import guide_of
from mlx_server.worker.constrained_decoding.token_classes import TokenClasses

texts = [bytes([byte]) for byte in range(256)]
classes = TokenClasses([*texts, b"<a>", b"<b>", b"<end>"], [258], [256, 257])
lark = Lark()
schema = {"enum": ["one", "two", "six"], "pattern": "^(ab|cd|ef)+$"}
thought, answer = "(<[256]> /(xy|yz|zx)+/ <[257]>)?", '("ab" | "cd" | "ef")'
guide = guide_of(lark.source(f"{thought} {answer} {lark.json(schema)}"), classes)
proposals = guide.values, guide.required, guide.following, guide.members, guide.tails
print(guide.own, guide.growth, guide.reserve)
print(list(guide.endings.after_control()), list(guide.endings.without(frozenset())))
print([one.without(frozenset()) for one in proposals])
"""


def _guide(seed: str) -> str:
    """The guide that a process makes whose sets are ordered by this seed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", GUIDE]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def guide() -> str:
    return _guide("0")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_proposes_the_same_in_the_same_order(guide: str, seed: str) -> None:
    assert len(guide) > 500
    assert _guide(seed) == guide
