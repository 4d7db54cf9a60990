"""The settings of the server and of its models: their values, their ranges, and what is refused."""

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
from tests.config.loading import MINIMAL, load, problem, problems_of, written
from tests.tables import cases

pytestmark = pytest.mark.usefixtures("folder")

SECRET = "sk-do-not-tell-4711"


@cases
def test_ranges_of_the_defaults(name: str, good: list[float], bad: list[float]) -> None:
    text = "models:\n  a:\n    source: x/y\n    defaults:\n      {}: {}\n"
    for value in good:
        assert problems_of(text.format(name, value)) == []
    for value in bad:
        assert problem(text.format(name, value)).line == 5


@cases
def test_keys_are_never_shown(text: str) -> None:
    path = written(text)
    try:
        shown = repr(load(path)) + str(load(path)) + str(load(path))
    except SettingsError as error:
        shown = repr(error) + error.message
        assert "models.yaml:1" in shown
    assert SECRET not in shown


@pytest.mark.parametrize("keys", [f"{SECRET},", f"{SECRET}\n{SECRET}", f"{SECRET}, ü"])
def test_keys_of_the_environment_are_never_shown(keys: str) -> None:
    with pytest.raises(SettingsError, match=r"^MLX_SERVER_API_KEYS: a key should be") as error:
        load(MLX_SERVER_API_KEYS=keys)
    assert SECRET not in repr(error.value)
    assert SECRET not in repr(error.value.__context__)


def test_the_prompt_cache_in_memory_and_on_disk(folder: Path) -> None:
    written("server: {prompt_cache: {memory: 2GB, disk: 500MB}}\n" + MINIMAL)
    found = load(MLX_SERVER_DATA="data")
    assert found.server.prompt_cache.memory == 2 * 10**9
    assert found.server.prompt_cache.disk == 5 * 10**8
    assert found.prompt_folder == folder / "data" / "prompts"


def test_without_bytes_on_disk_there_is_no_folder() -> None:
    written("server: {prompt_cache: {disk: 0}}\n" + MINIMAL)
    assert load().prompt_folder is None
    assert load().server.prompt_cache.memory is None


@cases
def test_mistakes_about_the_prompt_cache_are_told(text: str, problems_of: str) -> None:
    found = problem(f"server: {{prompt_cache: {text}}}\n" + MINIMAL)
    assert (found.line, problems_of in str(found)) == (1, True)


@pytest.mark.parametrize("size", ["0", "-1", "'12'", "lots", "12 TB", "1.5", "0GB", "true", "-1GB"])
def test_other_memory_budgets_are_told(size: str) -> None:
    found = problem(f"server: {{memory_budget: {size}}}\n" + MINIMAL)
    assert (found.line, "memory_budget" in str(found)) == (1, True)


@pytest.mark.parametrize("key", ["ttl: 0", "ttl: -5", "ttl: soon", "pinned: 1", "preload: 2"])
def test_how_long_a_model_stays_is_checked(key: str) -> None:
    found = problem(f"models: {{m: {{source: org/name, {key}}}}}")
    assert key.partition(":")[0] in str(found)


def test_adapters_lie_beside_the_file_unless_it_says_where(folder: Path) -> None:
    (folder / "team" / "adapters").mkdir(parents=True)
    (folder / "team" / "others").mkdir()
    path = written(MINIMAL, "team/models.yaml")
    assert load(path).server.adapters_dir == folder / "team" / "adapters"
    written("server: {adapters_dir: others, adapter_dirs: [., adapters]}\n", "team/models.yaml")
    server = load(path).server
    assert server.adapters_dir == folder / "team" / "others"
    assert server.adapter_dirs == (folder / "team", folder / "team" / "adapters")
    assert load().server.adapters_dir is None, "there is no such folder here"


def test_adapters_are_a_path_a_hub_id_or_more(folder: Path) -> None:
    entries = "a: ./lora/a, b: org/b, c: {path: /c, allow_other_base: true}"
    written(f"models:\n  m: {{source: demo:smollm2, adapters: {{{entries}}}}}\n")
    a, b, c = load().models["m"].adapters.values()
    assert (a.path, b.path, c.path) == (str(folder / "lora" / "a"), "org/b", "/c")
    assert (a.allow_other_base, c.allow_other_base) == (False, True)


@cases
def test_mistakes_in_adapters_are_told(entry: str, message: str) -> None:
    text = f"models:\n  m:\n    source: demo:smollm2\n    adapters:\n      {entry}\n"
    (line, said), *rest = problems_of(text)
    assert said.startswith(message) or any(s.startswith(message) for _, s in rest)
    assert line == 5


@pytest.mark.parametrize("key", ["adapters_dir: nowhere", "adapter_dirs: [nowhere]"])
def test_folders_of_adapters_must_be_there(folder: Path, key: str) -> None:
    assert "no such folder: 'nowhere'" in str(problem(f"server: {{{key}}}\n"))


@pytest.mark.parametrize("given", ["always", "-1", "1.5", "true", "4294967296", "[1]", "'1'"])
def test_other_amounts_are_told(given: str) -> None:
    text = f"models:\n  a: {{source: demo:smollm2, compute_ahead: {given}}}\n"
    assert problem(text).message == "should be auto, never or a number of tokens"


@pytest.mark.parametrize("bits", ["0", "3", "5", "32", "-8", "'8'", "8.5", "true", "1e9", "[8]"])
def test_other_bits_are_told(bits: str) -> None:
    found = problem(f"models:\n  a: {{source: x/y, kv_bits: {bits}}}\n")
    assert "models.a.kv_bits" in str(found)


@pytest.mark.parametrize(("given", "means"), [("off", "off"), ("auto", "auto"), ("'off'", "off")])
def test_speculation_is_automatic_or_off(given: str, means: str) -> None:
    path = written(f"models:\n  a: {{source: x/y, speculation: {given}}}\n")
    assert load(path).models["a"].speculation == means


@pytest.mark.parametrize("given", ["on", "true", "1", "[off]", "'no'"])
def test_another_word_for_speculation_is_told(given: str) -> None:
    found = problem(f"models:\n  a: {{source: x/y, speculation: {given}}}\n")
    assert "models.a.speculation: should be 'auto' or 'off'" in str(found)


def test_where_responses_are_stored(folder: Path) -> None:
    path = written("store: {data_dir: kept, days: 2}\n" + MINIMAL)
    store = load(path).store
    assert (store.data_dir, store.days) == (folder / "kept", 2)
    assert load(path, MLX_SERVER_DATA="there").store.data_dir == folder / "there"
    path.unlink()
    assert load().store.data_dir == Path("~/.local/share/mlx-server").expanduser()
    assert Settings().store.data_dir is None, "made in a program, it leaves nothing behind"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("data_di: x", "store.data_di: unknown key: did you mean `data_dir`?"),
        ("days: 0", "store.days: should be greater than 0"),
        ("data_dir: 3", "store.data_dir: should be"),
    ],
)
def test_mistakes_in_the_store_are_told(entry: str, message: str) -> None:
    assert str(problem(f"store: {{{entry}}}\n")).startswith(message)


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
