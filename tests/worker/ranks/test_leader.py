"""How the ranks on other machines are started, and reports that are none. No test runs ssh."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server.engine.worker_arguments import RankGroup, RankHost
from mlx_server.worker.ranks.leader import MODULE, rank_command
from tests.tables import cases

HERE, THERE = RankHost("localhost", ("127.0.0.1",), is_local=True), RankHost("mac2", ("10.0.0.2",))
ARGUMENTS = '{"a": "it\'s $HOME"}'


def remote(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the command as the shell of the other machine reads them."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    program, *_, host, text = rank_command(group, THERE, ARGUMENTS)
    assert (program, host) == ("ssh", "mac2")
    return shlex.split(text)


def test_a_rank_on_this_machine_is_a_process() -> None:
    group = RankGroup("tensor", (HERE, HERE), python="/elsewhere/python")
    assert rank_command(group, HERE, ARGUMENTS) == [sys.executable, "-m", MODULE, ARGUMENTS]


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


LEADER = """
import sys, time
from mlx_server.engine.worker_arguments import RankGroup, RankHost
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.worker.ranks.leader import Leader

class Sender:
    def send(self, *reports):
        print(*reports, flush=True)

sys.executable = sys.argv[1]
host = RankHost("localhost", ("127.0.0.1",), is_local=True)
Leader(RankGroup("tensor", (host, host)), WorkerArguments(), Sender())
time.sleep(20)
"""


@cases
def test_a_rank_that_sends_what_is_no_report_is_lost_at_once(
    tmp_path: Path, printed: str, why: str
) -> None:
    """As the banner of a shell, which is read as a frame of 1.6 GB."""
    rank = tmp_path / "python"
    wait = "exit 3" if "exit" in why else "exec sleep 20"
    rank.write_text(f"#!/bin/sh\nprintf '{printed}'\n{wait}\n")
    rank.chmod(0o755)
    command = [sys.executable, "-c", LEADER, str(rank)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"RankLost(rank=1, host='localhost', why='{why}" in ended.stdout
