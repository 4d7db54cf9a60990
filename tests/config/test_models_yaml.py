"""models.yaml, flags and environment: which wins, where paths lead, how mistakes are reported."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.config.settings import (
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
    StoreSettings,
    model_spec,
    size_in_bytes,
)
from mlx_server.errors import SettingsError
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamPolicy, UpstreamSpec
from tests.config.loading import MINIMAL, load, problem, problems_of, written
from tests.tables import cases

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
