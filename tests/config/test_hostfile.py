"""What load_hostfile makes of the hostfiles of mlx.launch, and how it reports mistakes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_server.config.hostfile import MAX_HOSTS, load_hostfile
from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.config.settings import model_specs
from mlx_server.config.yaml_lines import MAX_FILE_BYTES
from mlx_server.engine.worker_arguments import FIRST_PORT
from mlx_server.errors import SettingsError
from tests.tables import cases

ONE = {"ssh": "mac1.local", "ips": ["192.168.0.1"]}
TWO = {"ssh": "anna@mac2.local", "ips": ["192.168.0.2", "192.168.0.6"]}


def written(folder: Path, content: object) -> Path:
    path = folder / "hosts.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def problems(folder: Path, content: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_hostfile(written(folder, content))
    return caught.value.message.splitlines()


def test_a_list_of_hosts_is_read_in_the_order_of_ranks(tmp_path: Path) -> None:
    one, two = load_hostfile(written(tmp_path, [ONE, TWO])).hosts
    assert (one.ssh, one.ips, one.rdma) == ("mac1.local", ("192.168.0.1",), ())
    assert two.ips == ("192.168.0.2", "192.168.0.6")


def test_the_object_form_has_a_backend_variables_and_devices(tmp_path: Path) -> None:
    one, two = (
        {**ONE, "rdma": [None, "rdma_en2"]},
        {**TWO, "rdma": [["rdma_en2", "rdma_en3"], None]},
    )
    envs = ["MLX_METAL_FAST_SYNCH=1"]
    found = load_hostfile(
        written(tmp_path, {"backend": "jaccl", "envs": envs, "hosts": [one, two]})
    )
    assert found.backend == "jaccl"
    assert found.envs == ("MLX_METAL_FAST_SYNCH=1",)
    assert found.hosts[1].rdma == (("rdma_en2", "rdma_en3"), None)


def test_what_mlx_writes_is_read(tmp_path: Path) -> None:
    """`mlx.distributed_config --over ethernet` writes an empty backend; JSON may have tabs."""
    pytest.importorskip("mlx._distributed_utils.common")
    from mlx._distributed_utils.common import Host, Hostfile

    file = Hostfile([Host(0, "mac1", ["10.0.0.1"], []), Host(1, "mac2", ["10.0.0.2"], [])])
    text = json.dumps(file.to_json(), indent="\t")  # type: ignore[no-untyped-call]
    assert [host.ssh for host in load_hostfile(written(tmp_path, text.encode())).hosts] == [
        "mac1",
        "mac2",
    ]


def test_one_machine_may_play_several_hosts_on_loopback(tmp_path: Path) -> None:
    local = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    hosts = load_hostfile(written(tmp_path, [local, local])).hosts
    assert [host.is_local for host in hosts] == [True, True]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], "has no hosts: list at least one"),
        ({"hosts": []}, "has no hosts: list at least one"),
        ({}, "hosts: is missing"),
        (7, "should be an object"),
        ({"hosts": "mac1"}, "hosts: should be a list"),
        (["mac1"], "hosts[0]: should be an object"),
        ([{"ips": []}], "hosts[0].ssh: is missing"),
        ([{"ssh": 1}], "hosts[0].ssh: should be a string"),
        ([{**ONE, "port": 22}], "hosts[0].port: unknown key: remove it"),
        ([{**ONE, "ips": "192.168.0.1"}], "hosts[0].ips: should be a list"),
        ([{**ONE, "ips": ["fe80::1"]}], "hosts[0].ips[0]: should be an IPv4 address such as"),
        ([{**ONE, "ips": ["mac1.local"]}], "hosts[0].ips[0]: should be an IPv4 address such as"),
        ([{**ONE, "ips": ["0.0.0.0"]}], "hosts[0].ips[0]: should be the address of one host"),
        ([{**ONE, "ips": ["224.0.0.1"]}], "hosts[0].ips[0]: should be the address of one host"),
        ([{**ONE, "ips": ["10.0.0.1"] * 17}], "hosts[0].ips: should have at most 16 items"),
        ([ONE, ONE], "hosts[1].ips[0]: 192.168.0.1 is listed twice, first in hosts[0]"),
        ([ONE, {"ssh": "b", "ips": ["127.0.0.1"]}], "hosts[1].ips[0]: other hosts can't reach"),
        ([{**ONE, "rdma": ["rdma_en2", None]}], "hosts[0].rdma: should have one entry for each"),
        ([{**ONE, "rdma": ["rdma_en2"]}], "hosts[0].rdma[0]: should be null"),
        ([{**ONE, "rdma": ["; reboot"]}], "hosts[0].rdma[0]: should be the name of an RDMA device"),
        ({"hosts": [ONE], "backend": "jaccl"}, "hosts[0].rdma: is missing, but the backend jaccl"),
        ({"hosts": [ONE], "backend": "nccl"}, "backend: should be '', 'ring', 'jaccl' or"),
        ({"hosts": [ONE], "envs": ["PATH"]}, "envs[0]: should be `NAME=value`"),
        ([{"ssh": f"mac{i}"} for i in range(MAX_HOSTS + 1)], "should have at most 64 items"),
        (b"", "Invalid JSON: EOF while parsing"),
        (b"\xff", "Invalid JSON: "),
        (b"[" * 100_000, "Invalid JSON: "),
        (b" " * (MAX_FILE_BYTES + 1), "can't be read: it is larger than 1,048,576 bytes"),
    ],
)
def test_a_mistake_is_reported_with_its_place(
    tmp_path: Path, content: object, expected: str
) -> None:
    assert problems(tmp_path, content)[0].startswith(f"hosts.json: {expected}")


@pytest.mark.parametrize("name", ["-oProxyCommand=reboot", "a b", "a;b", "", "a\n", "$(b)", "é"])
def test_a_name_that_ssh_or_a_shell_would_read_otherwise_is_refused(
    tmp_path: Path, name: str
) -> None:
    (only,) = problems(tmp_path, [{"ssh": name}])
    assert only.startswith("hosts.json: hosts[0].ssh: should be a host name")


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    content: list[Any] = [{**ONE, "ips": ["x"]}, {"ssh": ""}]
    assert len(problems(tmp_path, content)) == 2


def test_a_missing_file_and_a_pipe_are_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none.json", "pipe"):
        with pytest.raises(SettingsError, match=f"{name}: can't be read: .* hostfile"):
            load_hostfile(tmp_path / name)


HOSTS = [{"ssh": "one.local", "ips": ["10.0.0.1"]}, {"ssh": "two.local", "ips": ["10.0.0.2"]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts.json").write_text(json.dumps(HOSTS), "utf-8")
    return tmp_path


def distributed_written(folder: Path, models: str) -> Path:
    file = folder / "models.yaml"
    file.write_text(f"models:\n{models}", "utf-8")
    return file


def test_hosts_are_a_file_or_a_list_and_groups_have_ports_one_after_the_other(folder: Path) -> None:
    listed = json.dumps(HOSTS)
    file = distributed_written(
        folder,
        f"  a: {{source: ./a, distributed: {{hosts: hosts.json}}}}\n"
        f"  b: {{source: ./b, distributed: {{hosts: {listed}, mode: pipeline}}}}\n"
        f"  c: {{source: ./c, distributed: {{hosts: hosts.json, port: 5000}}}}\n"
        f"  d: {{source: ./d}}\n",
    )
    a, b, c, d = (spec.group for spec in model_specs(load_settings(file, environ={})))
    assert a
    assert b
    assert c
    assert d is None
    assert [host.ssh for host in a.hosts] == [host.ssh for host in b.hosts]
    assert (a.port, b.port, c.port) == (FIRST_PORT, FIRST_PORT + 2, 5000)
    assert (a.mode, b.mode) == ("tensor", "pipeline")


@cases
def test_a_mistake_is_reported(model: str, problem: str, folder: Path) -> None:
    (found,) = check_file(distributed_written(folder, f"  a: {{{model}}}\n"))
    assert problem in str(found)


def test_a_hostfile_of_the_command_line_is_for_the_models_that_it_names(folder: Path) -> None:
    file = distributed_written(
        folder, "  a: {source: ./a}\n  up: {source: 'openai+http://127.0.0.1:1/v1'}\n"
    )
    hostfile = folder / "hosts.json"
    every = load_settings(file, environ={}, hostfile=hostfile).models
    assert {id for id, model in every.items() if model.distributed} == {"a"}
    named = load_settings(file, models=["./b"], environ={}, hostfile=hostfile).models
    assert {id for id, model in named.items() if model.distributed} == {"b"}
    with pytest.raises(SettingsError, match=r"none\.json"):
        load_settings(file, environ={}, hostfile=folder / "none.json")
