"""The records of other packages have what models.yaml says."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from mlx_server.config.models_yaml import spec_named
from mlx_server.config.settings import (
    PROMPT_FOLDER,
    ModelSettings,
    Settings,
    connector,
    model_spec,
    pool_limits,
    stored_login,
    validated,
)
from mlx_server.engine.worker_arguments import NO_DISK, PromptDisk
from mlx_server.errors import SettingsError
from mlx_server.mcp import ClientCredentials, StoredLogin
from mlx_server.pool.prepare import ModelSpec
from mlx_server.sources.cache import cache_dir
from tests.config.loading import MINIMAL, load, written

pytestmark = pytest.mark.usefixtures("folder")


def spec_of(**settings: object) -> ModelSpec:
    return model_spec("m", validated(ModelSettings, {"source": "org/name", **settings}))


@pytest.mark.parametrize(("loops", "found"), [("4", 4), ("off", None), ("'off'", None)])
def test_loops_are_counted_or_left_alone(loops: str, found: int | None) -> None:
    text = f"models:\n  a: {{source: demo:smollm2, repair: {{loops: {loops}}}}}\n"
    settings = load(written(text))
    assert model_spec("a", settings.models["a"]).repair.loops == found


def test_a_template_is_the_text_of_its_file(folder: Path) -> None:
    template = written("{{ 'é' }}", "t.jinja")
    assert spec_of(chat_template=str(template.absolute())).chat_template == "{{ 'é' }}"
    template.write_bytes(b"\xff")
    with pytest.raises(ValidationError, match=r"'t\.jinja' can't be read as UTF-8"):
        spec_of(chat_template=str(template.absolute()))


def test_a_name_is_an_id_or_an_alias_and_else_a_folder_or_a_hub_id(folder: Path) -> None:
    config = written(
        "models:\n"
        "  a: {source: org/a, aliases: [first], context_length: 7}\n"
        "  b: {source: org/b}\n"
        "server: {adapters_dir: here}\n",
        "models.yaml",
    )
    (folder / "here").mkdir()
    for name in ("a", "first"):
        found = spec_named(config, name)
        assert (found.id, found.context_length) == ("a", 7)
        assert found.adapters_dir == folder / "here"
    found = spec_named(config, "org/b")
    assert (found.id, found.source) == ("org/b", "org/b"), "the one that is listed is named b"
    (folder / "own").mkdir()
    assert spec_named(config, "./own").source == str(folder / "own")
    with pytest.raises(
        SettingsError, match=r"no model 'c' in models\.yaml.* one of a, b, a folder"
    ):
        spec_named(config, "c")


def test_how_long_lower_tiers_wait_is_a_setting() -> None:
    waits = load(written("server: {tier_wait: 5}\n" + MINIMAL))
    assert pool_limits(waits).tier_wait == 5 != pool_limits(Settings()).tier_wait


def test_prompts_are_kept_on_disk_where_there_is_a_folder(folder: Path) -> None:
    assert pool_limits(Settings()).prompt_disk == NO_DISK
    assert pool_limits(Settings()).curves is None
    kept = load(written("store: {data_dir: data}\nserver: {prompt_cache: {disk: 1GB}}\n" + MINIMAL))
    assert pool_limits(kept).prompt_disk == PromptDisk(str(folder / "data" / PROMPT_FOLDER), 10**9)
    assert pool_limits(kept).curves == cache_dir() / "curves"
    off = load(written("store: {data_dir: data}\nserver: {prompt_cache: {disk: 0GB}}\n" + MINIMAL))
    assert pool_limits(off).prompt_disk == NO_DISK


def test_secrets_of_a_connector_reach_its_server_alone(folder: Path) -> None:
    found = load(
        written(
            "connectors:\n"
            "  here: {command: npx, args: [-y, x], env: {TOKEN: hush}}\n"
            "  there: {url: 'https://nas.local', headers: {X-Key: hush}, "
            "oauth: {issuer: 'https://i', client_id: a, client_secret: hush}}\n"
            "  mine/own: {url: 'https://x', login: true}\n"
        )
    ).connectors
    here = connector("here", found["here"], None)
    assert (here.command, here.env, here.oauth) == (("npx", "-y", "x"), {"TOKEN": "hush"}, None)
    there = connector("there", found["there"], None)
    assert (there.command, there.headers, there.allow_private) == ((), {"X-Key": "hush"}, True)
    assert there.oauth == ClientCredentials("https://i", "a", "hush")
    login = connector("mine/own", found["mine/own"], folder).oauth
    assert isinstance(login, StoredLogin)
    assert (login.name, login.file.parent.parent) == ("mine/own", folder), "a name is no path"


def test_a_login_without_a_folder_to_keep_it_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match=r"'c'.*`data_dir` under `store`"):
        stored_login(None, "c")
