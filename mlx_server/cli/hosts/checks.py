"""Checks the hosts of a hostfile: which of them fails what, and what to do there."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import msgspec

from mlx_server.cli.hosts import probe
from mlx_server.cli.hosts.command import Answer, printable, run_on
from mlx_server.cli.hosts.link import FIRST_PORT, link_check, ports_of
from mlx_server.cli.machine_checks import Check, Status
from mlx_server.config.hostfile import Host, read_hostfile
from mlx_server.config.models_yaml import load_settings
from mlx_server.errors import SettingsError
from mlx_server.mcp.addresses import is_public
from mlx_server.pool.memory_budget import size
from mlx_server.sources.source import on_disk

PROBE_SECONDS = 60.0
"""MLX is not imported, but a large package on a slow disk is read."""

PROBE = Path(probe.__file__).read_text("utf-8")

SAME_PACKAGES = ("mlx", "mlx-lm", "mlx-local-server")
OLDEST_PYTHON = (3, 11)


class ModelFacts(msgspec.Struct):
    bytes: int
    digest: str
    problem: str


class HostFacts(msgspec.Struct):
    """What `probe` prints."""

    python: str
    machine: str
    memory: int
    packages: dict[str, str]
    source: str
    ports: list[tuple[str, int, str]]
    models: dict[str, ModelFacts]


@dataclass(frozen=True)
class Wanted:
    """What the hosts are asked for."""

    hosts: tuple[Host, ...]
    folders: Mapping[str, Path]
    """Of the models that they are to hold together, by the model's name."""
    python: str = sys.executable
    port: int = FIRST_PORT


def examine_hosts(hostfile: Path, config: Path | None) -> Iterator[Check]:
    """The checks of all hosts, with the models of models.yaml that are to be on each of them."""
    try:
        hosts = read_hostfile(hostfile)
        settings = load_settings(config)
    except SettingsError as error:
        for line in error.message.splitlines():
            yield Check("fail", "settings", line)
        return
    served = settings.models.items()
    folders = {id: on_disk(model.source, model.revision) for id, model in served}
    yield from host_checks(Wanted(hosts, {id: each for id, each in folders.items() if each}))


def host_checks(wanted: Wanted) -> Iterator[Check]:
    yield from asyncio.run(_checks(wanted))


async def _checks(wanted: Wanted) -> list[Check]:
    ranks = range(len(wanted.hosts))
    here, *asked = await asyncio.gather(
        _asked(wanted, None), *(_asked(wanted, rank) for rank in ranks)
    )
    if (own := _facts(here[0])) is None:
        return [Check("fail", "here", *_unreached(HERE, sys.executable, here[0]))]
    checks = [
        check
        for rank, (answer, seconds) in zip(ranks, asked, strict=True)
        for check in _host(wanted, rank, answer, seconds, own)
    ]
    if all(check.status == "ok" for check in checks if check.name != PUBLIC):
        return [*checks, await link_check(wanted.hosts, wanted.python, wanted.port)]
    return [*checks, Check("warn", "link", "not measured", "mend what is listed above first")]


async def _asked(wanted: Wanted, rank: int | None) -> tuple[Answer, float]:
    """rank: None asks this machine, with which the hosts are compared."""
    ports = [] if rank is None else ports_of(wanted.hosts, wanted.port)[rank]
    folders = [str(folder) for folder in wanted.folders.values()]
    parameters = json.dumps({"packages": SAME_PACKAGES, "ports": ports, "folders": folders})
    script = f"{PROBE}\nmain(json.loads({parameters!r}))\n"
    host, python = (HERE, sys.executable) if rank is None else (wanted.hosts[rank], wanted.python)
    began = time.perf_counter()
    answer = await run_on(host, [python, "-"], script.encode(), PROBE_SECONDS)
    return answer, time.perf_counter() - began


HERE = Host(ssh="localhost")


def _facts(answer: Answer) -> HostFacts | None:
    lines = answer.out.split(b"\n")
    last = next((line for line in reversed(lines) if line.strip()), b"")
    try:
        return msgspec.json.decode(last, type=HostFacts) if answer.status == 0 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _host(
    wanted: Wanted, rank: int, answer: Answer, seconds: float, own: HostFacts
) -> Iterator[Check]:
    host = wanted.hosts[rank]

    def line(status: Status, found: str, fix: str = "") -> Check:
        return Check(status, f"rank {rank}", printable(f"{host.ssh}: {found}"), printable(fix))

    facts = _facts(answer)
    if facts is None:
        yield line("fail", *_unreached(host, wanted.python, answer))
        return
    way = "this machine, without ssh" if host.is_local else "answers over ssh"
    yield line("ok", f"{way}, after {seconds:.1f} s")
    for status, found, fix in (
        _python(facts),
        *_packages(facts, own, wanted.python),
        *_models(wanted, host, facts, own),
        *_ports(facts),
    ):
        yield line(status, found, fix)
    yield from _public(host)


Finding = tuple[Status, str, str]

REFUSALS = (
    ("permission denied", "let your key in: ssh-copy-id {host}"),
    ("host key verification failed", "run `ssh {host}` once, compare its key and accept it"),
    ("could not resolve", "correct `ssh` in the hostfile, or give an address"),
    ("connection refused", "turn on Remote Login there (System Settings, General, Sharing)"),
    ("timed out", "is it on, awake and in this network?"),
    ("no route to host", "is it on, awake and in this network?"),
)


def _unreached(host: Host, python: str, answer: Answer) -> tuple[str, str]:
    said = answer.last_line
    if answer.cut == "no ssh":
        return "there is no `ssh` on this machine's PATH", "install an ssh client"
    if answer.cut == "slow":
        return f"no answer within {PROBE_SECONDS:.0f} s", f"try `ssh {host.ssh} true`"
    if answer.cut == "large" or answer.status == 0:
        fix = "its shell must print little without a terminal: look into ~/.zshenv and ~/.bashrc"
        return "what it answers is not the doctor's", fix
    if answer.status == 255 and not host.is_local:
        fixes = (fix for words, fix in REFUSALS if words in said.lower())
        return f"ssh: {said}", next(fixes, "try `ssh {host}` by hand").format(host=host.ssh)
    if answer.status in (126, 127):
        return f"no Python at {python}", "install mlx-server there at the same path as here"
    return f"{python} ended with status {answer.status}: {said}", f"try it: ssh {host.ssh} {python}"


def _python(facts: HostFacts) -> Finding:
    found = f"Python {facts.python} on {facts.machine}, {size(max(0, facts.memory))}"
    parts = facts.python.split(".")[:2]
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        return "fail", found, "use Python 3.11 to 3.14 there"
    is_old = tuple(map(int, parts)) < OLDEST_PYTHON
    return ("fail", found, "use Python 3.11 to 3.14 there") if is_old else ("ok", found, "")


def _packages(facts: HostFacts, own: HostFacts, python: str) -> Iterator[Finding]:
    wrong = False
    for name in SAME_PACKAGES:
        there, here = facts.packages.get(name, ""), own.packages.get(name, "")
        if there != here:
            wrong = True
            found = f"{name} {there or 'is missing'}, here {here or 'it is missing'}"
            yield "fail", found, f"there: {python} -m pip install {name}=={here}"
    if wrong:
        return
    if facts.source != own.source:
        yield "fail", "mlx_server has other code than here", "install the same commit on all hosts"
        return
    yield "ok", ", ".join(f"{name} {facts.packages[name]}" for name in SAME_PACKAGES), ""


def _models(wanted: Wanted, host: Host, facts: HostFacts, own: HostFacts) -> Iterator[Finding]:
    for name, folder in wanted.folders.items():
        there, here = facts.models.get(str(folder)), own.models[str(folder)]
        copy = f"rsync -a {folder}/ {host.ssh}:{folder}/"
        if there is None or there.problem:
            problem = there.problem if there else "not looked for"
            yield "fail", f"model {name}: {folder}: {problem}", copy
        elif there.digest != here.digest:
            yield "fail", f"model {name}: its config or list of weights is another one", copy
        elif there.bytes != here.bytes:
            found = f"model {name}: {size(max(0, there.bytes))} of weights, here {size(here.bytes)}"
            yield "fail", found, copy
        else:
            yield "ok", f"model {name}: {size(here.bytes)} of weights, as here", ""


def _ports(facts: HostFacts) -> Iterator[Finding]:
    for ip, port, problem in facts.ports:
        place = f"{ip}:{port}"
        if problem == "EADDRNOTAVAIL":
            fix = "correct `ips` in the hostfile, or give its link this address (Network settings)"
            yield "fail", f"{ip} is no address of it", fix
        elif problem == "EADDRINUSE":
            fix = "a running server has the group's ports; else end what listens there"
            yield "warn", f"{place} is in use", fix
        elif problem:
            yield "fail", f"can't listen at {place}: {problem}", "choose another port"
        else:
            yield "ok", f"{place} is free", ""


PUBLIC = "public"


def _public(host: Host) -> Sequence[Check]:
    public = [ip for ip in host.ips if is_public(str(ip_address(ip)))]
    fix = "ranks don't encrypt: use addresses of a cable or a private network"
    return [Check("warn", PUBLIC, f"{host.ssh}: {', '.join(public)}", fix)] if public else []
