"""`mlx-server doctor --hostfile`: hosts that are played by a script called ssh."""

import asyncio
import json
import os
import platform
import socket
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from mlx_server.cli import app, host_probe
from mlx_server.cli.hosts import SAME_PACKAGES, CommandOutput, examine_hosts, host_checks, run_on
from mlx_server.cli.machine_checks import Check
from mlx_server.engine.worker_arguments import RankGroup, RankHost
from tests.live.ranks import free_ports

ROOT = Path(__file__).parents[2]

SSH = r"""#!/bin/sh
while [ $# -gt 2 ]; do echo "$1" >> "$0.arguments"; shift; done
case $1 in
    good) exec sh -c "$2" ;;
    refusing) echo "anna@refusing: Permission denied (publickey)." >&2; exit 255 ;;
    unknown) echo "Host key verification failed." >&2; exit 255 ;;
    pythonless) echo "sh: $2: not found" >&2; exit 127 ;;
    garbage) cat > /dev/null; printf '\033[2J{"python": "3.12", "packages": []}\n' ;;
    flood) yes ;;
    hanging) sleep 600; exit 1 ;;
    *) cat > /dev/null; cat "$0.$1" ;;
esac
"""

MARK = "TEST_HOSTS_OF"
"""A variable that the processes of these tests have, with the id of the test's process."""

LOOPBACK = ("127.0.0.1",)

HERE = RankHost("first", LOOPBACK)
"""Rank 0 is on this machine, whatever its name is; so no host called `first` is played."""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(MARK, str(os.getpid()))
    return script


@pytest.fixture
def port() -> int:
    return free_ports(2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    return folder


def group(port: int, *hosts: RankHost | str) -> RankGroup:
    """The ranks after rank 0; a name alone has no addresses."""
    others = [RankHost(host, ()) if isinstance(host, str) else host for host in hosts]
    return RankGroup("tensor", (HERE, *others), port)


def checked(port: int, *hosts: RankHost | str, **models: Path) -> list[Check]:
    return list(host_checks(group(port, *hosts), models))


def of_rank(checks: list[Check], rank: int) -> list[Check]:
    return [check for check in checks if check.name == f"rank {rank}"]


def bad(checks: list[Check], rank: int) -> list[tuple[str, str, str]]:
    found = [check for check in of_rank(checks, rank) if check.status != "ok"]
    return [(check.status, check.found, check.fix) for check in found]


def started_here() -> list[psutil.Process]:
    """The processes that still run, also those whose parent has ended."""
    user = os.getuid()
    found = psutil.process_iter(["uids", "environ", "cmdline"])
    own = [each for each in found if each.info["uids"] and each.info["uids"].real == user]
    return [each for each in own if (each.info["environ"] or {}).get(MARK) == str(os.getpid())]


def facts(**changed: object) -> str:
    """What a host like this one would answer."""
    own = {
        "python": platform.python_version(),
        "machine": "Darwin arm64",
        "memory": 64 << 30,
        "packages": {name: host_probe.version(name) for name in SAME_PACKAGES},
        "source": host_probe.source(),
        "places": {},
        "models": {},
    }
    return json.dumps(own | changed)


def test_a_good_host_over_ssh_has_what_this_machine_has(port: int, model: Path, ssh: Path) -> None:
    checks = checked(port, RankHost("good", LOOPBACK), big=model)
    assert [check for check in checks if check.status == "fail"] == []
    found = [check.found for check in of_rank(checks, 1)]
    assert found[0].startswith("good: answers over ssh")
    assert "good: model big: 1000 bytes of weights, as here" in found
    assert f"good: 127.0.0.1:{port + 1} is free" in found
    options = ssh.with_name("ssh.arguments").read_text()
    assert "BatchMode=yes" in options
    assert "ConnectTimeout=5" in options


def test_the_models_of_the_settings_that_are_split_over_the_hosts_are_looked_for(
    tmp_path: Path, port: int, model: Path
) -> None:
    (tmp_path / "hosts.json").write_text(
        '[{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "localhost", "ips": ["127.0.0.1"]}]'
    )
    (tmp_path / "models.yaml").write_text(
        f"models:\n  big: {{source: {model}, distributed: {{hosts: hosts.json, port: {port}}}}}\n"
        "  small: {source: demo:smollm2}\n"
    )
    checks = list(examine_hosts(tmp_path / "hosts.json", tmp_path / "models.yaml"))
    found = [check.found for check in of_rank(checks, 1)]
    assert "localhost: model big: 1000 bytes of weights, as here" in found
    assert not any("small" in each for each in found)
    assert f"localhost: 127.0.0.1:{port + 1} is free" in found


def test_each_host_that_can_not_be_asked_says_why_and_what_to_do(port: int) -> None:
    names = ("refusing", "unknown", "pythonless", "garbage", "flood")
    checks = checked(port, *names)
    found = [bad(checks, rank) for rank in range(1, len(names) + 1)]
    assert [len(each) for each in found] == [1] * len(names)
    problems = [each[0] for each in found]
    assert {status for status, _, _ in problems} == {"fail"}
    refusing, unknown, pythonless, garbage, flood = problems
    assert "Permission denied" in refusing[1]
    assert refusing[2] == "let your key in: ssh-copy-id refusing"
    assert unknown[2] == "run `ssh unknown` once, compare its key and accept it"
    assert "no Python at" in pythonless[1]
    for each in (garbage, flood):
        assert each[1].endswith("what it answers is not the doctor's")


def test_other_versions_code_and_files_are_compared_with_those_here(
    port: int, model: Path, ssh: Path
) -> None:
    here = host_probe.model(str(model))
    packages = {name: host_probe.version(name) for name in SAME_PACKAGES}
    answers = {
        "older": facts(packages={**packages, "mlx": "0.31.0", "mlx-lm": ""}, models={}),
        "commit": facts(source="0" * 64, models={str(model): {**here, "bytes": 7}}),
        "config": facts(models={str(model): {**here, "digest": "0" * 64}}),
        "python": facts(python="3.9.6", models={str(model): here}),
        "same": "welcome to same\n" + facts(models={str(model): here}),
    }
    for name, answer in answers.items():
        ssh.with_name(f"ssh.{name}").write_text(answer)
    checks = checked(port, *answers, big=model)
    older, commit, config, python, same = (bad(checks, rank) for rank in range(1, 6))
    assert older[0][1] == f"older: mlx 0.31.0, here {packages['mlx']}"
    assert older[0][2].endswith(f"-m pip install mlx=={packages['mlx']}")
    assert older[1][1] == f"older: mlx-lm is missing, here {packages['mlx-lm']}"
    assert older[2][2] == f"rsync -a {model}/ older:{model}/"
    assert commit[0][1] == "commit: mlx_server has other code than here"
    assert commit[1][1] == "commit: model big: 7 bytes of weights, here 1000 bytes"
    assert config[0][1] == "config: model big: its config or list of weights is another one"
    assert python == [
        ("fail", "python: Python 3.9.6 on Darwin arm64, 68.7 GB", "use Python 3.11 to 3.14 there")
    ]
    assert same == []


def test_hostile_facts_are_no_crash_and_control_no_terminal(port: int, ssh: Path) -> None:
    answers = {
        "control": facts(python="3.12\x1b[2J\n", packages={"mlx": "\x1b]0;x\x07"}, memory=-(2**62)),
        "digits": facts(python="9" * 5000 + ".1"),
        "deep": "[" * 200_000,
        "types": facts(places=[1]),
    }
    for name, answer in answers.items():
        ssh.with_name(f"ssh.{name}").write_text(answer)
    checks = checked(port, *answers)
    assert all(bad(checks, rank) for rank in range(1, len(answers) + 1))
    assert all(text.isprintable() for check in checks for text in (check.found, check.fix))
    assert max(len(check.found) for check in checks) <= 200


@pytest.mark.slow
def test_a_host_that_hangs_is_left_and_no_process_stays(port: int) -> None:
    answer = asyncio.run(run_on(group(port, "hanging"), 1, ["true"], b"", seconds=1.0))
    assert answer == CommandOutput(None, cut="slow")
    assert ["sleep", "600"] not in [each.info["cmdline"] for each in started_here()]


def test_an_address_of_another_host_and_a_port_in_use_are_found(port: int) -> None:
    elsewhere = RankHost("localhost", ("192.0.2.7", "8.8.8.8"), is_local=True)
    with socket.create_server(("127.0.0.1", port)):
        checks = checked(port, elsewhere)
    in_use = bad(checks, 0)
    assert [each[:2] for each in in_use] == [("warn", f"first: 127.0.0.1:{port} is in use")]
    assert [each[1] for each in bad(checks, 1)] == [
        "localhost: 192.0.2.7 is no address of it",
        "localhost: 8.8.8.8 is no address of it",
    ]
    public = [check for check in checks if check.name == "public"]
    assert [(check.status, check.found) for check in public] == [("warn", "localhost: 8.8.8.8")]


@pytest.mark.slow
def test_the_command_exits_with_1_for_a_bad_hostfile_and_names_the_place(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('[{"ssh": "-oProxyCommand=x"}]')
    result = CliRunner().invoke(app, ["doctor", "--hostfile", str(file)])
    assert result.exit_code == 1
    assert "fail settings  hosts.json: hosts[0].ssh: should be a host name" in result.stdout
