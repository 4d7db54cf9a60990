"""`distributed`, and `serve --hostfile`."""

import json
from pathlib import Path

import pytest

from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.config.settings import model_specs
from mlx_server.engine.worker_arguments import FIRST_PORT
from mlx_server.errors import SettingsError
from tests.tables import cases

HOSTS = [{"ssh": "one.local", "ips": ["10.0.0.1"]}, {"ssh": "two.local", "ips": ["10.0.0.2"]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts.json").write_text(json.dumps(HOSTS), "utf-8")
    return tmp_path


def written(folder: Path, models: str) -> Path:
    file = folder / "models.yaml"
    file.write_text(f"models:\n{models}", "utf-8")
    return file


def test_hosts_are_a_file_or_a_list_and_groups_have_ports_one_after_the_other(folder: Path) -> None:
    listed = json.dumps(HOSTS)
    file = written(
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
    (found,) = check_file(written(folder, f"  a: {{{model}}}\n"))
    assert problem in str(found)


def test_a_hostfile_of_the_command_line_is_for_the_models_that_it_names(folder: Path) -> None:
    file = written(folder, "  a: {source: ./a}\n  up: {source: 'openai+http://127.0.0.1:1/v1'}\n")
    hostfile = folder / "hosts.json"
    every = load_settings(file, environ={}, hostfile=hostfile).models
    assert {id for id, model in every.items() if model.distributed} == {"a"}
    named = load_settings(file, models=["./b"], environ={}, hostfile=hostfile).models
    assert {id for id, model in named.items() if model.distributed} == {"b"}
    with pytest.raises(SettingsError, match=r"none\.json"):
        load_settings(file, environ={}, hostfile=folder / "none.json")
