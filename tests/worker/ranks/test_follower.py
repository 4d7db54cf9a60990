"""A rank other than 0 ends with what it reads from rank 0, and writes nothing but reports."""

import subprocess
import sys

import pytest

from mlx_server.engine import messages
from mlx_server.engine.worker_arguments import (
    RankArguments,
    RankGroup,
    RankHost,
    WorkerArguments,
    encode_arguments,
)
from mlx_server.worker.ranks.link import (
    REPORT_BYTES,
    RankFailed,
    RankReport,
    decode_report,
    encode_input,
)
from tests.live.ranks import loopback_group

pytestmark = pytest.mark.slow

ARGUMENTS = encode_arguments(RankArguments(1, loopback_group(2), WorkerArguments())).decode()
COMMAND = [sys.executable, "-m", "mlx_server.worker.ranks.follower", ARGUMENTS]

HEARTBEAT = messages.frame(b"")
FRAME = messages.frame(encode_input([]))
NOTICED = 20.0
"""Seconds in which the end of rank 0 is noticed: less than the limit on its silence."""


@pytest.mark.parametrize(
    "sent",
    [b"", HEARTBEAT[:2], HEARTBEAT + FRAME[:-1]],
    ids=["nothing", "half a header", "no payload"],
)
def test_it_ends_with_rank_0_even_in_the_middle_of_a_frame(sent: bytes) -> None:
    run = subprocess.run(COMMAND, input=sent, capture_output=True, timeout=NOTICED)
    assert (run.returncode, run.stderr) == (0, b"")


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
