"""models.yaml, flags and environment: which wins, where paths lead, what values may be, and how
mistakes are reported."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from mlx_server.config.models_yaml import check_file, load_settings, spec_named
from mlx_server.config.settings import (
    PROMPT_FOLDER,
    AdapterSettings,
    ApiKey,
    Bytes,
    BytesOrNone,
    ConnectorSettings,
    DistributedSettings,
    ModelSettings,
    OAuthSettings,
    PromptCacheSettings,
    RepairSettings,
    SamplingDefaults,
    ServerSettings,
    Settings,
    StoreSettings,
    connector,
    model_spec,
    pool_limits,
    size_in_bytes,
    stored_login,
    validated,
)
from mlx_server.config.yaml_lines import YamlProblem
from mlx_server.engine.worker_arguments import NO_DISK, PromptDisk
from mlx_server.errors import SettingsError
from mlx_server.mcp import ClientCredentials, StoredLogin
from mlx_server.pool.prepare import ModelSpec
from mlx_server.sources.cache import cache_dir
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamPolicy, UpstreamSpec
from tests.tables import cases

MINIMAL = "models:\n  a: {source: demo:smollm2}\n"


def written(text: str | bytes, name: str = "models.yaml") -> Path:
    path = Path(name)
    path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    return path


def load(
    path: Path | None = None,
    models: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
    **environ: str,
) -> Settings:
    return load_settings(path, models=models, overrides=overrides or {}, environ=environ)


def problems_of(text: str | bytes) -> list[tuple[int, str]]:
    return [(problem.line, str(problem)) for problem in check_file(written(text))]


def problem(text: str | bytes) -> YamlProblem:
    (only,) = check_file(written(text))
    return only


pytestmark = pytest.mark.usefixtures("folder")

ROOT = Path(__file__).parents[2]


def test_flags_win_over_environment_over_file_over_defaults() -> None:
    path = written("server: {host: 127.0.0.2, port: 1, drain_seconds: 7}\n" + MINIMAL)
    environ = {"MLX_SERVER_HOST": "127.0.0.3", "MLX_SERVER_PORT": "2"}
    server = load(path, overrides={"port": 3, "host": None}, **environ).server
    assert (server.port, server.host, server.drain_seconds, server.concurrency) == (
        3,
        "127.0.0.3",
        7,
        16,
    )


def test_an_empty_variable_is_not_set() -> None:
    path = written("server: {port: 1}\n")
    assert load(path, MLX_SERVER_PORT="", MLX_SERVER_API_KEYS="").server.port == 1


def test_keys_are_replaced_and_not_added_to() -> None:
    path = written("server: {api_keys: [one]}\n")
    assert load(path, MLX_SERVER_API_KEYS="two, three").server.api_keys == (
        ApiKey("two"),
        ApiKey("three"),
    )
    flags = {"api_keys": ("four",)}
    assert load(path, overrides=flags, MLX_SERVER_API_KEYS="two").server.api_keys == (
        ApiKey("four"),
    )


def test_without_a_file_the_demo_is_served() -> None:
    (model,) = load().models.values()
    assert (model.source, model.preload) == ("demo:smollm2", True)


def test_a_file_without_models_serves_the_demo_in_its_own_way() -> None:
    settings = load(written("server: {port: 9}\n"))
    assert (list(settings.models), settings.server.port) == (["smollm2-135m"], 9)


def test_which_file_is_read() -> None:
    written("models: {here: {source: demo:smollm2}}\n")
    named = written("models: {named: {source: demo:smollm2}}\n", "named.yaml")
    variable = written("models: {variable: {source: demo:smollm2}}\n", "variable.yaml")
    assert list(load().models) == ["here"]
    assert list(load(MLX_SERVER_CONFIG=str(variable)).models) == ["variable"]
    assert list(load(named, MLX_SERVER_CONFIG=str(variable)).models) == ["named"]


def test_models_of_the_command_line_take_the_place_of_a_file_nobody_named(folder: Path) -> None:
    path = written("server: {api_keys: [k]}\n" + MINIMAL)
    (folder / "qwen").mkdir()
    alone = load(models=["./qwen/", "org/name"])
    assert list(alone.models) == ["qwen", "org/name"]
    assert [model.source for model in alone.models.values()] == [str(folder / "qwen"), "org/name"]
    assert all(model.preload for model in alone.models.values())
    assert alone.server.api_keys, "what the file says about the server still holds"
    assert list(load(path, models=["org/name"]).models) == ["a", "org/name"]
    assert list(load(models=["org/name"], MLX_SERVER_CONFIG=str(path)).models) == ["a", "org/name"]


def test_a_name_may_be_given_once() -> None:
    path = written("models:\n  a: {source: demo:smollm2, aliases: [b]}\n")
    with pytest.raises(SettingsError, match=r"'\./2/c': another model is called 'c' already"):
        load(models=["./1/c", "./2/c"])
    for taken in ("./a", "./b"):
        with pytest.raises(SettingsError, match="another model is called"):
            load(path, models=[taken])


def test_paths_are_relative_to_the_file(folder: Path) -> None:
    (folder / "conf" / "org" / "here").mkdir(parents=True)
    written("{{ messages }}", "conf/t.jinja")
    text = """
        models:
          folder: {source: org/here, chat_template: t.jinja}
          missing: {source: ../models/x/y}
          home: {source: ~/m}
          hub: {source: org/elsewhere}
          scheme: {source: "hf:org/here"}
    """
    models = load(written(text, "conf/models.yaml")).models
    assert models["folder"].source == str(folder / "conf/org/here")
    assert models["folder"].chat_template == "{{ messages }}"
    assert models["missing"].source == str(folder / "models/x/y")
    assert models["home"].source == str(Path.home() / "m")
    assert models["hub"].source == "org/elsewhere"
    assert models["scheme"].source == "hf:org/here"


@cases
def test_a_mistake_is_told_with_its_line(text: str, line: int, message: str) -> None:
    found = problem(text)
    assert (found.line, str(found)[: len(message)]) == (line, message)
    assert "secret" not in str(found)


def test_every_mistake_is_told_in_the_order_of_lines() -> None:
    text = """\
        server:
          port: eighty
          port: 81
        models:
          a:
            sauce: x/y
          b:
            source: x/y
            defaults: {top_p: 7, temperature: hot}
    """
    path = written(text)
    with pytest.raises(SettingsError) as error:
        load(path, overrides={"concurrency": 0}, MLX_SERVER_PORT="http")
    places = [message.rsplit(": ", 1)[0] for message in error.value.message.splitlines()]
    assert [place.replace(": unknown key", "") for place in places] == [
        "models.yaml:2: server.port",
        "models.yaml:3: server.port",
        "models.yaml:5: models.a.source",
        "models.yaml:6: models.a.sauce",
        "models.yaml:9: models.b.defaults.temperature",
        "models.yaml:9: models.b.defaults.top_p",
        "MLX_SERVER_PORT",
        "--concurrency",
    ]


def test_names_are_unique_across_the_file() -> None:
    text = """\
        models:
          a:
            source: x/y
            aliases: [c, b]
          b:
            source: x/y
            aliases:
              - d
              - c
          a: {source: x/z}
    """
    assert problems_of(text) == [
        (4, "models.a.aliases[1]: the name is taken by `models.b`"),
        (9, "models.b.aliases[1]: the name is taken by `models.a`"),
        (10, "models.a: duplicate key, first on line 2"),
    ]


def test_a_replay_model_has_its_files_beside_models_yaml(folder: Path) -> None:
    written("models: {m: {source: 'replay:here.jsonl', family: plain}}")
    assert load().models["m"].source == f"replay:{folder / 'here.jsonl'}"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.2", "studio.local", "127.0.0.1.nip.io"]
)
def test_other_machines_need_a_key_or_the_owners_word(host: str) -> None:
    with pytest.raises(SettingsError, match=r"(?s)MLX_SERVER_API_KEYS.*allow_insecure: true"):
        load(overrides={"host": host})
    with pytest.raises(SettingsError, match="without a key"):
        load(MLX_SERVER_HOST=host)
    assert load(overrides={"host": host, "api_keys": ("k",)}).server.host == host
    assert load(overrides={"host": host, "allow_insecure": True}).server.host == host


def test_the_file_that_ships_is_right() -> None:
    assert problems_of((ROOT / "models.yaml").read_text()) == []
    assert load().models["smollm2-135m"].source == "demo:smollm2"


def test_all_settings_are_shown(folder: Path) -> None:
    text = (ROOT / "mlx_server" / "config" / "all_settings.yaml").read_text()
    written("", "qwen3.jinja")
    (folder / "adapters").mkdir()
    (folder / "lora").mkdir()
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "localhost", "ips": ["127.0.0.1"]}]
    written(json.dumps(hosts), "hosts.json")
    shown = re.sub(r"^( *)# ( *[\w-]+:)", r"\1\2", text, flags=re.MULTILINE)
    assert problems_of(shown) == []
    given = yaml.safe_load(shown)
    models = {key: value for model in given["models"].values() for key, value in model.items()}
    connectors = {
        key: value for each in given["connectors"].values() for key, value in each.items()
    }
    for record, keys in {
        ServerSettings: given["server"],
        PromptCacheSettings: given["server"]["prompt_cache"],
        StoreSettings: given["store"],
        ModelSettings: {**models, "space_id": ""},
        RepairSettings: models["repair"],
        SamplingDefaults: models["defaults"],
        AdapterSettings: models["adapters"]["legal"],
        DistributedSettings: models["distributed"],
        UpstreamPolicy: models["upstream"],
        UpstreamCapabilities: models["capabilities"],
        ConnectorSettings: connectors,
        OAuthSettings: connectors["oauth"],
    }.items():
        assert set(keys) == {each.name for each in fields(record) if not each.metadata}, record
    settings = load()
    stated = settings.models["gpt-oss-cloud"].capabilities
    assert stated
    assert replace(stated, stated=frozenset()) == UpstreamCapabilities()
    support = settings.models["qwen3"].adapters["support"]
    assert (support.path, support.allow_other_base) == (str(folder / "lora" / "support"), False)


# Connectors in models.yaml.


def test_a_connector_has_one_way_to_its_server(folder: Path) -> None:
    text = """
        connectors:
          here: {command: ./tools/server, args: [-v], env: {TOKEN: hush}}
          found: {command: npx}
          there: {url: "https://example.com/mcp", headers: {X-Key: hush}}
    """
    found = load(written(text)).connectors
    assert found["here"].command == str(folder / "tools" / "server")
    assert found["found"].command == "npx"
    assert "hush" not in repr(found)
    logins = "connectors:\n  a: {url: 'https://x', login: true}\n"
    assert load(written(logins)).connectors["a"].login is True
    for wrong, message in {
        "{}": "should have either a `url` or a `command`",
        "{url: 'https://x', command: y}": "should have either a `url` or a `command`",
        "{url: 'https://x', args: [y]}": "`args` needs a `command`",
        "{url: 'file:///etc/passwd'}": "should be an http or https URL",
        "{comand: x}": "unknown key: did you mean `command`?",
        "{command: x, oauth: {issuer: 'https://i', client_id: a, client_secret: b}}": (
            "`oauth` needs a `url`"
        ),
        "{command: x, login: true}": "`login` needs a `url`",
        "{url: 'https://x', login: true, oauth: {client_id: a, client_secret: b}}": (
            "`oauth` needs an `issuer`"
        ),
        "{url: 'https://x', oauth: {client_id: a, issuer: 'https://i'}}": "or a `login`",
    }.items():
        assert message in str(problem(f"connectors:\n  a: {wrong}\n"))


# Values that several settings have: sizes and paths.


@cases
def test_a_size_is_exact_to_the_byte(size: object, nbytes: object) -> None:
    assert size_in_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size",
    [
        *("12", "12 gb", "12GiB", "12TB", "GB", "-1GB", "1,5GB", ".5GB", "1.GB", "1e3GB", ""),
        *(" 1GB", "1GB\n", "1  GB", "nanGB", "infGB", "٣GB", "1_0GB", "9" * 400 + "GB"),
    ],
)
def test_what_is_no_size_says_what_one_is(size: str) -> None:
    for kind in (Bytes, BytesOrNone):
        with pytest.raises(ValidationError, match="should be a size such as 12GB or 800MB"):
            TypeAdapter(kind).validate_python(size)


def test_nothing_is_a_size_only_where_it_means_none() -> None:
    assert TypeAdapter(BytesOrNone).validate_python("0MB") == 0
    for size in (0, "0GB", "0.0000001MB", -1):
        with pytest.raises(ValidationError):
            TypeAdapter(Bytes).validate_python(size)


# YAML with its lines: hostile files are refused at once, and the line is named.


def bomb() -> str:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(["l0: &l0 [x, x]", *levels])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("server:\n\tport: 1\n", 2, r"YAML: found character '\\t'.*: indent with spaces"),
        (
            "server:\n    port: 1\n  host: a\n",
            3,
            "YAML: .*: indent the keys of one mapping equally",
        ),
        ("server:\n  port 1\n  host: a\n", 3, "YAML: .*: write `key: value`"),
        ("server: {port: 1\n", 2, "YAML: .*line 1"),
        ("a: 'b\n\n", 3, "YAML: found unexpected end of stream .*quoted scalar, line 1"),
        ("server: {}\n---\nserver: {}\n", 2, "YAML: but found another document"),
        (bomb(), 2, "YAML aliases"),
        ("a: &a [*a]\n", 1, "YAML aliases"),
        ("a:\n  b: !!python/object/apply:os.system [ls]\n", 2, "YAML tags"),
        ("a: " + "[" * 100_000, 1, "is nested too deeply"),
        (b"# \xc3\xa4\nserver: \xff\n", 2, "is not UTF-8"),
        ("server:\n  host: a\0b\n", 2, "has a control character"),
        ("#" * (2 << 20), 0, "is larger than 1 MiB"),
    ],
)
def test_hostile_files_are_refused_at_once(text: str | bytes, line: int, message: str) -> None:
    found = problem(text)
    assert found.line == line
    assert re.match(message, found.message)


@pytest.mark.parametrize("value", ["1" * 5000, ":".join(["59"] * 5000), "2024-99-99", "<<", "="])
def test_values_that_yaml_chokes_on(value: str) -> None:
    found = problems_of(f"server:\n  host: h\n  port: {value}\n")
    assert {line for line, _ in found} == {3}
    assert found[0][1].startswith("server.port: can't be read")


def test_merge_keys_are_not_supported() -> None:
    assert problem("server:\n  <<: {port: 1}\n").message == "a key is not text: quote it"


def test_a_missing_file_a_folder_and_an_empty_file(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"^gone\.yaml:1: can't be read: No such file"):
        load(Path("gone.yaml"))
    with pytest.raises(SettingsError, match="can't be read: Is a directory"):
        load(folder)
    assert (
        problems_of("")
        == problems_of("# nothing\n")
        == problems_of("\ufeffserver: {port: 1}\r\n")
        == []
    )


SECRET = "hunter2"


def upstream_written(folder: Path, entry: str) -> Path:
    file = folder / "models.yaml"
    lines = "".join(f"    {line}\n" for line in entry.splitlines())
    file.write_text(f"models:\n  up:\n{lines}", "utf-8")
    return file


def spec(folder: Path, entry: str) -> UpstreamSpec:
    settings = load_settings(upstream_written(folder, entry), environ={})
    found = model_spec("up", settings.models["up"]).upstream
    assert found
    return found


def test_an_entry_with_nothing_but_its_source(tmp_path: Path) -> None:
    found = spec(tmp_path, "source: openai+https://example.com/v1/")
    assert (found.kind, found.url) == ("openai", "https://example.com/v1")
    assert (found.model, found.host) == ("up", "example.com")
    assert found.capabilities == UpstreamCapabilities()


@cases
def test_a_mistake(entry: str, wrong: str, tmp_path: Path) -> None:
    (problem,) = check_file(upstream_written(tmp_path, entry))
    assert wrong in str(problem)
    assert SECRET not in str(problem)


def test_capabilities_have_the_defaults_of_their_kind(tmp_path: Path) -> None:
    entry = "source: watsonx:https://example.com\nproject_id: p\napi_key_env: KEY\n"
    assert not spec(tmp_path, entry).capabilities.sampling
    found = spec(tmp_path, entry + "capabilities: {tools: false}")
    assert (found.capabilities.sampling, found.capabilities.tools) == (False, False)
    assert not found.capabilities.completions


@pytest.mark.parametrize("host", ["api.openai.com", "mine.openai.azure.com/openai"])
def test_openais_own_api_is_known_by_its_host(host: str, tmp_path: Path) -> None:
    own = spec(tmp_path, f"source: openai+https://{host}/v1").capabilities
    assert (own.max_tokens_field, own.sampling) == ("max_completion_tokens", False)
    other = spec(tmp_path, "source: openai+https://api.openai.com.example.com/v1").capabilities
    assert (other.max_tokens_field, other.sampling) == ("max_tokens", True)


HUSH = "sk-do-not-tell-4711"


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
    assert HUSH not in shown


@pytest.mark.parametrize("keys", [f"{HUSH},", f"{HUSH}\n{HUSH}", f"{HUSH}, ü"])
def test_keys_of_the_environment_are_never_shown(keys: str) -> None:
    with pytest.raises(SettingsError, match=r"^MLX_SERVER_API_KEYS: a key should be") as error:
        load(MLX_SERVER_API_KEYS=keys)
    assert HUSH not in repr(error.value)
    assert HUSH not in repr(error.value.__context__)


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
