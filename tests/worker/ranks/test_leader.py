"""How the ranks on other machines are started. The command is run by no test: it needs ssh."""

import shlex
import sys

import pytest

from mlx_server.engine.rank_group import RankGroup, RankHost
from mlx_server.worker.ranks.leader import MODULE, _command

HERE, THERE = RankHost("localhost", ("127.0.0.1",), is_local=True), RankHost("mac2", ("10.0.0.2",))
ARGUMENTS = '{"a": "it\'s $HOME"}'


def remote(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the command as the shell of the other machine reads them."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    program, *_, host, text = _command(group, THERE, ARGUMENTS)
    assert (program, host) == ("ssh", "mac2")
    return shlex.split(text)


def test_a_rank_on_this_machine_is_a_process() -> None:
    group = RankGroup("tensor", (HERE, HERE), python="/elsewhere/python")
    assert _command(group, HERE, ARGUMENTS) == [sys.executable, "-m", MODULE, ARGUMENTS]


def test_a_rank_elsewhere_gets_its_variables_and_arguments_by_ssh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = RankGroup("tensor", (HERE, THERE), variables=(("A", "b c; d"),))
    assert remote(group, monkeypatch) == [
        *("exec", "env", "A=b c; d", "PYTHONHASHSEED=7"),
        *(sys.executable, "-m", MODULE, ARGUMENTS),
    ]


def test_the_owner_names_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup("tensor", (HERE, THERE), python="/opt/mlx/bin/python")
    assert remote(group, monkeypatch)[3:5] == ["/opt/mlx/bin/python", "-m"]
