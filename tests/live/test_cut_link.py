"""A group over two hosts whose cable is pulled. A network namespace is the second host, and a
script plays ssh.

The script's pipes stay whole, like an ssh connection over another interface: only the ring's
connections are cut, and no process ends by itself.
"""

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlx_server.engine.worker_arguments import Mode, RankGroup, RankHost
from mlx_server.errors import EngineDied
from tests.engine.clients import asynchronous
from tests.live.ranks import free_ports
from tests.live.server import assert_gone
from tests.live.test_ranks import running, the_others, up_to
from tests.tiny import tiny_llama

OURS, THEIRS = "10.213.77.1", "10.213.77.2"

NOTICED = 30.0
"""Seconds in which the cut is an error, on a busy machine too. The first step of a kind may take
FIRST_STEP_SECONDS, so it is the connections that notice it, after LOST_SECONDS."""

pytestmark = pytest.mark.skipif(
    not shutil.which("ip") or os.getuid() != 0, reason="needs root and iproute2"
)


class Link:
    """A cable between this machine and a second host."""

    def __init__(self) -> None:
        self.host = f"mlx-{secrets.token_hex(3)}"
        self._ours, self._theirs = f"{self.host}a", f"{self.host}b"

    def plug_in(self) -> None:
        ip("netns", "add", self.host)
        ip("link", "add", self._ours, "type", "veth", "peer", self._theirs, "netns", self.host)
        ip("address", "add", f"{OURS}/30", "dev", self._ours)
        ip("-netns", self.host, "address", "add", f"{THEIRS}/30", "dev", self._theirs)
        ip("link", "set", self._ours, "up")
        ip("-netns", self.host, "link", "set", self._theirs, "up")

    def pull(self) -> None:
        ip("link", "set", self._ours, "down")

    def remove(self) -> None:
        ip("link", "delete", self._ours)
        ip("netns", "delete", self.host)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    link = Link()
    try:
        link.plug_in()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    script = tmp_path / "ssh"
    script.write_text(
        f'#!/bin/sh\nfor last; do :; done\nexec ip netns exec {link.host} sh -c "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield link
    link.remove()


@pytest.mark.parametrize(("stage", "mode"), [("decode", "tensor")])
@asynchronous
async def test_a_cut_link_is_an_error_and_leaves_nothing_running(
    stage: str, mode: Mode, link: Link, tmp_path: Path
) -> None:
    path = tiny_llama(tmp_path / "tiny")
    hosts = (RankHost("first", (OURS,), is_local=True), RankHost("second", (THEIRS,)))
    async with running(RankGroup(mode, hosts, port=free_ports(2))) as group:
        ranks = [psutil.Process(group.pid), *the_others(group)]
        assert len(ranks) == 2
        with pytest.raises(EngineDied, match=r"(?i)send the request again"):
            async with asyncio.timeout(NOTICED):
                await up_to(stage, group, path, link.pull)
    assert_gone(ranks)
