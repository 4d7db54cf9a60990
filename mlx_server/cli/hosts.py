"""Checks the hosts of a hostfile: which of them fails what, and what to do there.

What comes back was written by another machine: its size and time are bounded, and it is only shown
and compared.
"""

import asyncio
import json
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import msgspec

from mlx_server.cli import host_probe
from mlx_server.cli.machine_checks import Check, Status
from mlx_server.config.hostfile import load_hostfile
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import DistributedSettings, model_specs
from mlx_server.engine.worker_arguments import FIRST_PORT, RankGroup
from mlx_server.errors import SettingsError
from mlx_server.mcp.addresses import is_public
from mlx_server.pool.memory import size
from mlx_server.sources.source import on_disk

SSH = (
    "ssh",
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5"),
    *("-o", "LogLevel=ERROR", "-o", "ForwardAgent=no", "-T"),
)
"""The ssh command: it asks nothing, accepts no unknown key, and gives up on a host that is
silent."""

MOST_BYTES = 256 << 10
"""The limit on each output stream."""

SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class CommandOutput:
    status: int | None
    """The exit status; None if the command did not end by itself."""
    out: bytes = b""
    err: bytes = b""
    cut: Literal["", "no ssh", "slow", "large"] = ""
    """Why the command did not end by itself; empty if it did."""

    @property
    def last_line(self) -> str:
        """The last line of its error output, fit to be shown."""
        lines = self.err.decode(errors="replace").split("\n")
        return printable(next((line for line in reversed(lines) if line.strip()), ""))


def python_of(group: RankGroup) -> str:
    """The interpreter of the other machines."""
    return group.python or sys.executable


def printable(text: str) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in text.strip())
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 3] + "..."


async def run_on(
    group: RankGroup, rank: int, arguments: Sequence[str], stdin: bytes, seconds: float
) -> CommandOutput:
    """Runs the Python of a rank's host. Rank 0 is on this machine, as the server will be.

    It leaves no process here. What runs on another machine needs limits of its own.
    """
    host = group.hosts[rank]
    is_here = host.is_local or rank == 0
    python = sys.executable if is_here else python_of(group)
    command = ["env", *(f"{name}={value}" for name, value in group.variables), python, *arguments]
    line = command if is_here else [*SSH, host.ssh, f"exec {shlex.join(command)}"]
    with TemporaryFile() as out, TemporaryFile() as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES,) * 2),
            )
        except OSError:
            return CommandOutput(None, cut="no ssh")
        try:
            async with asyncio.timeout(seconds):
                await process.communicate(stdin)
        except TimeoutError:
            return CommandOutput(None, cut="slow")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        said, error = (os.pread(file.fileno(), MOST_BYTES, 0) for file in (out, err))
        if max(len(said), len(error)) == MOST_BYTES:
            return CommandOutput(None, cut="large")
        return CommandOutput(process.returncode, said, error)


PROBE_SECONDS = 60.0
"""Limit on a probe. It does not import MLX, but reads a large package, perhaps on a slow disk."""

PROBE = Path(host_probe.__file__).read_text("utf-8")

SAME_PACKAGES = ("mlx", "mlx-lm", "mlx-local-server")
OLDEST_PYTHON = (3, 11)


class FolderFacts(msgspec.Struct):
    bytes: int
    digest: str
    problem: str


class HostFacts(msgspec.Struct):
    """The facts about a host that `probe` prints."""

    python: str
    machine: str
    memory: int
    packages: dict[str, str]
    source: str
    places: dict[str, str]
    """The addresses on which a rank can't listen, each with the reason."""
    models: dict[str, FolderFacts]


def examine_hosts(hostfile: Path, config: Path | None) -> Iterator[Check]:
    """The checks of all hosts, with those models of models.yaml that are split over them."""
    try:
        over = DistributedSettings(hosts=load_hostfile(hostfile))
        settings = load_settings(config)
    except SettingsError as error:
        for line in error.message.splitlines():
            yield Check("fail", "settings", line)
        return
    group = over.group(FIRST_PORT)
    specs = [
        spec for spec in model_specs(settings) if spec.group and spec.group.hosts == group.hosts
    ]
    folders = {spec.id: on_disk(spec.source, spec.revision) for spec in specs}
    for id, folder in folders.items():
        if not folder:
            yield Check("fail", "model", f"{id} is not on this machine", f"mlx-server pull {id}")
    present = {id: folder for id, folder in folders.items() if folder}
    chosen = next((spec.group for spec in specs if spec.group), group)
    yield from host_checks(chosen, present)


def host_checks(group: RankGroup, folders: Mapping[str, Path]) -> Iterator[Check]:
    """folders: of the models that the hosts are to hold together, by the model's name."""
    yield from asyncio.run(_checks(group, folders))


async def _checks(group: RankGroup, folders: Mapping[str, Path]) -> list[Check]:
    ranks = range(len(group.hosts))
    asked = await asyncio.gather(*(_asked(group, folders, rank) for rank in ranks))
    if (own := _facts(asked[0][0])) is None:
        return [_line(group, 0, "fail", *unreached(group, 0, asked[0][0]))]
    return [
        check
        for rank, (answer, seconds) in zip(ranks, asked, strict=True)
        for check in _host(group, folders, rank, answer, seconds, own)
    ]


async def _asked(
    group: RankGroup, folders: Mapping[str, Path], rank: int
) -> tuple[CommandOutput, float]:
    wanted = {
        "packages": SAME_PACKAGES,
        "places": group.addresses()[rank],
        "folders": [str(folder) for folder in folders.values()],
    }
    script = f"{PROBE}\nmain(json.loads({json.dumps(wanted)!r}))\n"
    began = time.perf_counter()
    answer = await run_on(group, rank, ["-"], script.encode(), PROBE_SECONDS)
    return answer, time.perf_counter() - began


def _facts(answer: CommandOutput) -> HostFacts | None:
    lines = answer.out.split(b"\n")
    last = next((line for line in reversed(lines) if line.strip()), b"")
    try:
        return msgspec.json.decode(last, type=HostFacts) if answer.status == 0 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _line(group: RankGroup, rank: int, status: Status, finding: str, fix: str = "") -> Check:
    text = f"{group.hosts[rank].ssh}: {finding}"
    return Check(status, f"rank {rank}", printable(text), printable(fix))


def _host(
    group: RankGroup,
    folders: Mapping[str, Path],
    rank: int,
    answer: CommandOutput,
    seconds: float,
    own: HostFacts,
) -> Iterator[Check]:
    host, python = group.hosts[rank], python_of(group)
    facts = _facts(answer)
    if facts is None:
        yield _line(group, rank, "fail", *unreached(group, rank, answer))
        return
    way = "this machine, without ssh" if rank == 0 or host.is_local else "answers over ssh"
    for finding in (
        ("ok", f"{way}, after {seconds:.1f} s", ""),
        _python(facts),
        *_packages(facts, own, python),
        *_models(folders, host.ssh, facts, own),
        *_ports(facts),
    ):
        yield _line(group, rank, *finding)
    if public := [ip for ip in host.ips if is_public(ip)]:
        fix = "ranks don't encrypt: use addresses of a cable or a private network"
        yield Check("warn", "public", f"{host.ssh}: {', '.join(public)}", fix)


Finding = tuple[Status, str, str]
"""The status, what was found and what to do."""

REFUSALS = (
    ("permission denied", "let your key in: ssh-copy-id {host}"),
    ("host key verification failed", "run `ssh {host}` once, compare its key and accept it"),
    ("could not resolve", "correct `ssh` in the hostfile, or give an address"),
    ("connection refused", "turn on Remote Login there (System Settings, General, Sharing)"),
    ("timed out", "is it on, awake and in this network?"),
    ("no route to host", "is it on, awake and in this network?"),
)


def unreached(group: RankGroup, rank: int, answer: CommandOutput) -> tuple[str, str]:
    host, said, python = group.hosts[rank], answer.last_line, python_of(group)
    if answer.cut == "no ssh":
        return "there is no `ssh` on this machine's PATH", "install an ssh client"
    if answer.cut == "slow":
        return f"no answer within {PROBE_SECONDS:.0f} s", f"try `ssh {host.ssh} true`"
    if answer.cut == "large" or answer.status == 0:
        fix = "its shell must print little without a terminal: look into ~/.zshenv and ~/.bashrc"
        return "what it answers is not the doctor's", fix
    if answer.status == 255 and not host.is_local:
        fixes = (fix for words, fix in REFUSALS if words in said.lower())
        return f"ssh: {said.removeprefix('ssh: ')}", next(fixes, "try `ssh {host}` by hand").format(
            host=host.ssh
        )
    if answer.status in (126, 127):
        fix = "install mlx-server at this path, or set `python` under `distributed`"
        return f"no Python at {python}", fix
    return f"{python} ended with status {answer.status}: {said}", f"try it: ssh {host.ssh} {python}"


def _python(facts: HostFacts) -> Finding:
    version = f"Python {facts.python} on {facts.machine}, {size(max(0, facts.memory))}"
    parts = facts.python.split(".")[:2]
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        return "fail", version, "use Python 3.11 to 3.14 there"
    is_old = tuple(map(int, parts)) < OLDEST_PYTHON
    return ("fail", version, "use Python 3.11 to 3.14 there") if is_old else ("ok", version, "")


def _packages(facts: HostFacts, own: HostFacts, python: str) -> Iterator[Finding]:
    wrong = False
    for name in SAME_PACKAGES:
        there, here = facts.packages.get(name, ""), own.packages.get(name, "")
        if there != here:
            wrong = True
            difference = f"{name} {there or 'is missing'}, here {here or 'it is missing'}"
            yield "fail", difference, f"there: {python} -m pip install {name}=={here}"
    if wrong:
        return
    if facts.source != own.source:
        yield "fail", "mlx_server has other code than here", "install the same commit on all hosts"
        return
    yield "ok", ", ".join(f"{name} {facts.packages[name]}" for name in SAME_PACKAGES), ""


def _models(
    folders: Mapping[str, Path], ssh: str, facts: HostFacts, own: HostFacts
) -> Iterator[Finding]:
    for name, folder in folders.items():
        there, here = facts.models.get(str(folder)), own.models[str(folder)]
        copy = f"rsync -a {folder}/ {ssh}:{folder}/"
        if there is None or there.problem:
            problem = there.problem if there else "not looked for"
            yield "fail", f"model {name}: {folder}: {problem}", copy
        elif there.digest != here.digest:
            yield "fail", f"model {name}: its config or list of weights is another one", copy
        elif there.bytes != here.bytes:
            difference = (
                f"model {name}: {size(max(0, there.bytes))} of weights, here {size(here.bytes)}"
            )
            yield "fail", difference, copy
        else:
            yield "ok", f"model {name}: {size(here.bytes)} of weights, as here", ""


def _ports(facts: HostFacts) -> Iterator[Finding]:
    for place, problem in facts.places.items():
        if problem == "EADDRNOTAVAIL":
            fix = "correct `ips` in the hostfile, or give its link this address (Network settings)"
            yield "fail", f"{place.partition(':')[0]} is no address of it", fix
        elif problem == "EADDRINUSE":
            fix = "a running server has the group's ports; else end what listens there"
            yield "warn", f"{place} is in use", fix
        elif problem:
            fix = "set another `port` under `distributed`"
            yield "fail", f"can't listen at {place}: {problem}", fix
        else:
            yield "ok", f"{place} is free", ""
