"""The processes that render chat templates: what they serve, see and can open, and how fast."""

import os
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from mlx_server import limits
from mlx_server.system.sandbox import template_child
from mlx_server.system.sandbox.chat_template import PROGRAM, TemplateProcesses, ask, packed
from mlx_server.system.sandbox.parent import WarmProcess
from mlx_server.system.sandbox.template_messages import RenderTemplate


def rendered(own: WarmProcess, source: str, seconds: float) -> str:
    return ask(own, packed(RenderTemplate(source, {}, seconds, 9)), seconds)[1]


def pids() -> set[int]:
    found = psutil.Process().children()
    return {each.pid for each in found if template_child.__file__ in each.cmdline()}


def test_one_process_serves_all_templates() -> None:
    before = pids()
    with closing(TemplateProcesses()) as processes:
        for number in range(2 * limits.COMPILED_TEMPLATES):
            assert processes.render_made(f"{number}{{{{ x }}}}", lambda: {"x": "a"}) == f"{number}a"
        assert (
            processes.render_made("0{{ x }}", lambda: {"x": "b"}) == "0b"
        )  # which it had forgotten
        assert len(pids() - before) == 1


ESCAPED = f"""
import sys
sys.path.insert(0, {os.path.dirname(template_child.__file__)!r})
import template_child, os, socket, subprocess
from mlx_server.system.sandbox import child
template_child._warm_up()
child.enter_sandbox(64 << 20)
for crime in (
    lambda: open("/etc/passwd"),
    lambda: socket.socket(),
    lambda: subprocess.Popen(["true"]),
    lambda: bytearray(256 << 20),
):
    try:
        crime()
    except (OSError, MemoryError) as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit of the address space")
def test_what_gets_out_of_the_sandbox_can_open_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-I", "-c", ESCAPED], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["OSError", "OSError", "OSError", "MemoryError"]


def test_it_is_told_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "secret")
    own = WarmProcess(PROGRAM)
    try:
        assert "secret" not in psutil.Process(own._process.pid).environ().values()
        assert rendered(own, "a", 1) == "a"
        assert psutil.Process(own._process.pid).num_fds() == 4  # its lifeline too
    finally:
        own.end()
