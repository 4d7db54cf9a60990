"""The worker's process ends with its server, whatever was unread."""

import os
import select
import socket
import subprocess
import sys

import pytest

from mlx_server.engine import messages
from mlx_server.engine.messages import LoadModel
from mlx_server.engine.worker_arguments import WorkerArguments, encode_arguments
from tests.engine.clients import HANG

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arguments", [(encode_arguments(WorkerArguments()).decode(),), ()])
def test_a_server_gone_before_the_engine_is_ready_is_no_error(arguments: tuple[str, ...]) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "mlx_server.worker.process", str(theirs.fileno()), *arguments]
    ours.close()
    with theirs:
        run = subprocess.run(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, timeout=HANG
        )
    assert (run.returncode, run.stderr) == (0, b"")


def test_the_engine_goes_when_its_server_left_reports_unread() -> None:
    """A socket closed with something unread in it ends the other side's reading with an error."""
    ours, theirs = socket.socketpair()
    arguments = encode_arguments(WorkerArguments(concurrency=4)).decode()
    module = "mlx_server.worker.process"
    command = [sys.executable, "-m", module, str(theirs.fileno()), arguments]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.settimeout(HANG)
        with ours.makefile("rb") as ready:
            ready.read(messages.length(ready.read(messages.HEADER_BYTES)))
        ours.sendall(messages.frame(messages.encode_commands([LoadModel("lost", "/nowhere")])))
        assert select.select([ours], [], [], HANG)[0]
        ours.close()
        try:
            worker.wait(HANG)
        finally:
            worker.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's")
def test_the_engine_keeps_its_time_slices() -> None:
    ours, theirs = socket.socketpair()
    reset = "os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))"
    module = "import runpy; runpy.run_module('mlx_server.worker.process', run_name='__main__')"
    command = [sys.executable, "-c", f"import os; {reset}; {module}", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.settimeout(HANG)
        ours.sendall(messages.frame(encode_arguments(WorkerArguments())))
        try:
            assert ours.recv(1)
            assert os.sched_getscheduler(worker.pid) == os.SCHED_BATCH
        finally:
            worker.kill()
