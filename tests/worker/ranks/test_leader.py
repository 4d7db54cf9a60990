"""How ranks are started, what ends them, and reports that are none. No test runs ssh."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server.engine import messages
from mlx_server.engine.worker_arguments import (
    RankArguments,
    RankGroup,
    RankHost,
    WorkerArguments,
    encode_arguments,
)
from mlx_server.worker.ranks.leader import MODULE, rank_command
from mlx_server.worker.ranks.link import (
    REPORT_BYTES,
    RankFailed,
    RankReport,
    decode_report,
    encode_input,
)
from tests.live.ranks import loopback_group
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


FOLLOWER = encode_arguments(RankArguments(1, loopback_group(2), WorkerArguments())).decode()
COMMAND = [sys.executable, "-m", "mlx_server.worker.ranks.follower", FOLLOWER]

HEARTBEAT = messages.frame(b"")
FRAME = messages.frame(encode_input([]))
NOTICED = 20.0
"""Seconds in which the end of rank 0 is noticed: less than the limit on its silence."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [b"", HEARTBEAT[:2], HEARTBEAT + FRAME[:-1]],
    ids=["nothing", "half a header", "no payload"],
)
def test_it_ends_with_rank_0_even_in_the_middle_of_a_frame(sent: bytes) -> None:
    run = subprocess.run(COMMAND, input=sent, capture_output=True, timeout=NOTICED)
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("payload", [b"\xc1", b"\x91\x81\xa4type\xa7Unknown"])
def test_an_input_that_it_can_not_read_ends_it_with_a_log_line(payload: bytes) -> None:
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as rank:
        assert rank.stdin
        assert rank.stderr
        try:
            rank.stdin.write(messages.frame(payload))
            rank.stdin.flush()
            assert rank.wait(NOTICED) == 1
        finally:
            rank.kill()
        assert b"an input of rank 0 can't be read" in rank.stderr.read()


@pytest.mark.slow
def test_a_long_error_is_reported_within_the_limit() -> None:
    addresses = ("127.0.0.1:1" + "0" * REPORT_BYTES, "127.0.0.1")  # MLX's error has the first
    group = RankGroup(
        "tensor", tuple(RankHost("localhost", (ip,), is_local=True) for ip in addresses)
    )
    arguments = encode_arguments(RankArguments(1, group, WorkerArguments())).decode()
    with subprocess.Popen(
        [*COMMAND[:-1], arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdin
        assert rank.stdout
        rank.stdin.write(messages.frame(encode_input(True)))
        rank.stdin.flush()
        found: list[RankReport] = []
        while header := rank.stdout.read(messages.HEADER_BYTES):
            size = messages.length(header)
            assert size <= REPORT_BYTES
            found.append(decode_report(rank.stdout.read(size)))
    assert isinstance(found[-1], RankFailed)
    assert "127.0.0.1:1000" in found[-1].why
