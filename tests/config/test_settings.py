"""What load_settings makes of files, variables and flags, and how it tells of mistakes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import SecretStr, ValidationError

from mlx_server import limits
from mlx_server.app import create_app
from mlx_server.config.connectors import ConnectorSettings, LoginSettings, OAuthSettings
from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.config.settings import (
    ServerSettings,
    Settings,
)
from mlx_server.config.upstream import CapabilitySettings
from mlx_server.config.yaml_lines import YamlProblem
from mlx_server.engine.messages import Schedule
from mlx_server.engine.worker_arguments import decode_worker_arguments, encode_arguments
from mlx_server.errors import SettingsError
from mlx_server.upstream.spec import UpstreamCapabilities

ROOT = Path(__file__).parents[2]
SECRET = "sk-do-not-tell-4711"

MINIMAL = "models:\n  a: {source: demo:smollm2}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests run in an empty folder, where the only models.yaml is their own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_flags_win_over_environment_over_file_over_defaults() -> None:
    path = written("server: {host: 127.0.0.2, port: 1, queue: 7}\n" + MINIMAL)
    environ = {"MLX_SERVER_HOST": "127.0.0.3", "MLX_SERVER_PORT": "2"}
    server = load(path, overrides={"port": 3, "host": None}, **environ).server
    assert (server.port, server.host, server.queue, server.concurrency) == (3, "127.0.0.3", 7, 16)


def test_an_empty_variable_is_not_set() -> None:
    path = written("server: {port: 1}\n")
    assert load(path, MLX_SERVER_PORT="", MLX_SERVER_API_KEYS="").server.port == 1


def test_keys_are_replaced_and_not_added_to() -> None:
    path = written("server: {api_keys: [one]}\n")
    assert load(path, MLX_SERVER_API_KEYS="two, three").server.api_keys == (
        SecretStr("two"),
        SecretStr("three"),
    )
    flags = {"api_keys": ("four",)}
    assert load(path, overrides=flags, MLX_SERVER_API_KEYS="two").server.api_keys == (
        SecretStr("four"),
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
    assert models["folder"].chat_template == folder / "conf/t.jinja"
    assert models["missing"].source == str(folder / "models/x/y")
    assert models["home"].source == str(Path.home() / "m")
    assert models["hub"].source == "org/elsewhere"
    assert models["scheme"].source == "hf:org/here"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().server.port = 1


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("servre: {}\n", 1, "servre: unknown key: did you mean `server`?"),
        ("server:\n  prot: 1\n", 2, "server.prot: unknown key: did you mean `port`?"),
        (
            "models:\n  a:\n    source: x/y\n    alias: [b]\n",
            4,
            "models.a.alias: unknown key: did you mean `aliases`?",
        ),
        (
            "models:\n  a:\n    source: x/y\n    defaults:\n      temprature: 1\n",
            5,
            "models.a.defaults.temprature: unknown key: did you mean `temperature`?",
        ),
        (
            "models:\n  a:\n    source: x/y\n    repair:\n      jsn: true\n",
            5,
            "models.a.repair.jsn: unknown key: did you mean `json`?",
        ),
        (
            "models:\n  a:\n    source: x/y\n    repair: {streaming: late}\n",
            4,
            "models.a.repair.streaming: should be 'live' or 'accumulate'",
        ),
        (
            "models:\n  a:\n    source: x/y\n    repair: {retries: 99}\n",
            4,
            "models.a.repair.retries: should be less than or equal to 4",
        ),
        (
            "nonsense: 1\n",
            1,
            "nonsense: unknown key: known here are server, store, models, connectors",
        ),
        ("server:\n\n  port: '1'\n", 3, "server.port: should be a valid integer"),
        ("server:\n  port: true\n", 2, "server.port: should be a valid integer"),
        ("server:\n  drain_seconds: .nan\n", 2, "server.drain_seconds: should be a finite number"),
        ("server:\n  port: 65536\n", 2, "server.port: should be less than or equal to 65535"),
        ("server:\n  concurrency: 0\n", 2, "server.concurrency: should be greater than or equal"),
        ("server:\n  prefill_share: 1.0\n", 2, "server.prefill_share: should be less than or eq"),
        ("server:\n  longest_gap: 0\n", 2, "server.longest_gap: should be greater than or equal"),
        ("server:\n  log_level: loud\n", 2, "server.log_level: should be 'debug', 'info'"),
        ("server:\n  allow_insecure: 1\n", 2, "server.allow_insecure: should be a valid boolean"),
        ("server:\n  api_keys: one\n", 2, "server.api_keys: should be a list"),
        ("server:\n  api_keys:\n  - one\n  - ''\n", 4, "server.api_keys: a key should be one or"),
        ("server:\n  host:\n", 2, "server.host: has no value"),
        ("server: [1]\n", 1, "server: should be a mapping"),
        ("server:\n", 1, "server: has no value"),
        ("models: null\n", 1, "models: has no value"),
        ("models:\n  a:\n", 2, "models.a: has no value"),
        ("models:\n  a: {}\n", 2, "models.a.source: is missing"),
        ("models:\n  a: {source: ''}\n", 2, "models.a.source: String should have at least 1"),
        ("models:\n  a:\n    source: 5\n", 3, "models.a.source: should be a valid string"),
        ("models:\n  a:\n    chat_template: no\n    source: x/y\n", 3, "models.a.chat_template: "),
        ("models:\n  ' a': {source: x/y}\n", 2, "models. a: should be 1 to 256 printable"),
        ('models:\n  "a\\e": {source: x/y}\n', 2, "models.'a\\x1b': should be 1 to 256 printable"),
        ("models:\n  '': {source: x/y}\n", 2, "models.'': should be 1 to 256 printable"),
        ("models:\n  on: {source: x/y}\n", 2, "models: a key is not text: quote it"),
        ("models:\n  ? [a]\n  : {source: x/y}\n", 2, "models: a key is not text: quote it"),
        ("- server\n", 1, "should be a mapping with the keys `server`, `store` and `models`"),
        ("just text\n", 1, "should be a mapping with the keys `server`, `store` and `models`"),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, line: int, message: str) -> None:
    found = problem(text)
    assert (found.line, str(found)[: len(message)]) == (line, message)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", (0, 2), (-0.1, 2.1)),
        ("top_p", (0.01, 1), (0, 1.01)),
        ("top_k", (0, 50), (-1, 1.5)),
        ("min_p", (0, 1), (-0.1, 1.1)),
        ("repetition_penalty", (0.1, 10), (0, 10.1)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
        ("max_tokens", (1, 9), (0, 1.5)),
    ],
)
def test_ranges_of_the_defaults(name: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    text = "models:\n  a:\n    source: x/y\n    defaults:\n      {}: {}\n"
    for value in good:
        assert problems_of(text.format(name, value)) == []
    for value in bad:
        assert problem(text.format(name, value)).line == 5


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


def bomb() -> str:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(["l0: &l0 [x, x]", *levels])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("server:\n\tport: 1\n", 2, r"YAML: found character '\\t'.*: indent with spaces"),
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


@pytest.mark.parametrize(
    "text",
    [
        f"server: {{api_keys: [{SECRET}]}}\n",
        f"server: {{api_keys: {SECRET}}}\n",
        f"server: {{api_keys: [[{SECRET}]]}}\n",
        f"server: {{api_keys: ['{SECRET} with space']}}\n",
        f"server: {{api_keys: {{{SECRET}: 1, {SECRET}: 2}}}}\n",
        f"server: {{api-keys: [{SECRET}]}}\n",
        f"server: {{api_keys: [*{SECRET}]}}\n",
        f"server: {{api_keys: [!{SECRET} x]}}\n",
        f"server: {{api_keys: [{SECRET}, !{SECRET}]\n",
    ],
)
def test_keys_are_never_shown(text: str) -> None:
    path = written(text)
    try:
        shown = repr(load(path)) + str(load(path)) + str(load(path).model_dump())
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


def test_keys_are_not_in_pydantics_own_errors() -> None:
    with pytest.raises(ValidationError) as error:
        ServerSettings.model_validate({"api_keys": [SECRET]})
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("written_as", "nbytes"),
    [("12GB", 12 * 10**9), ("800 MB", 8 * 10**8), ("1.5GB", 15 * 10**8), ("4096", 4096)],
)
def test_a_memory_budget_is_a_size(written_as: str, nbytes: int) -> None:
    written(f"server: {{memory_budget: {written_as}}}\n" + MINIMAL)
    assert load().server.memory_budget == nbytes


@pytest.mark.parametrize(
    ("written_as", "nbytes"), [("4GB", 4 * 10**9), ("0", 0), ("null", None), ("800MB", 8 * 10**8)]
)
def test_what_the_prompt_cache_may_take_is_a_size_or_nothing(
    written_as: str, nbytes: int | None
) -> None:
    written(f"server: {{prompt_cache_bytes: {written_as}}}\n" + MINIMAL)
    assert load().server.prompt_cache_bytes == nbytes


def test_the_prompt_cache_in_memory_and_on_disk(
    folder: Path,
) -> None:
    written("server: {prompt_cache: {memory: 2GB, disk: 500MB, folder: here}}\n" + MINIMAL)
    found = load(MLX_SERVER_DATA="data")
    assert found.server.prompt_cache_memory == 2 * 10**9
    assert found.server.prompt_cache.disk == 5 * 10**8
    assert found.prompt_folder == folder / "here"


def test_prompts_are_kept_in_the_data_directory(folder: Path) -> None:
    written(MINIMAL)
    found = load(MLX_SERVER_DATA="data")
    assert found.prompt_folder == folder / "data" / "prompts"
    assert found.server.prompt_cache.disk == limits.PROMPT_FILE_BYTES.value


def test_without_bytes_on_disk_there_is_no_folder() -> None:
    written("server: {prompt_cache: {disk: 0}}\n" + MINIMAL)
    assert load().prompt_folder is None
    assert load().server.prompt_cache_memory is None


@pytest.mark.parametrize(
    ("text", "problems_of"),
    [
        ("{disk: -1}", "disk"),
        ("{disk: 12TB}", "12GB"),
        ("{memory: lots}", "memory"),
        ("{folder: 3}", "folder"),
        ("{disc: 1GB}", "did you mean `disk`"),
        ("[]", "should be a mapping"),
        ("{memory: 1GB}, prompt_cache_bytes: 1GB", "the same setting"),
    ],
)
def test_mistakes_about_the_prompt_cache_are_told(text: str, problems_of: str) -> None:
    found = problem(f"server: {{prompt_cache: {text}}}\n" + MINIMAL)
    assert (found.line, problems_of in str(found)) == (1, True)


@pytest.mark.parametrize("size", ["0", "-1", "'12'", "lots", "12 TB", "1.5", "0GB", "true", "-1GB"])
def test_other_memory_budgets_are_told(size: str) -> None:
    found = problem(f"server: {{memory_budget: {size}}}\n" + MINIMAL)
    assert (found.line, "memory_budget" in str(found)) == (1, True)


@pytest.mark.parametrize(
    ("written_as", "wired"),
    [("auto", "auto"), ("never", "never"), ("20GB", 20 * 10**9), ("4096", 4096)],
)
def test_what_is_wired(written_as: str, wired: object) -> None:
    written(f"server: {{wired: {written_as}}}\n" + MINIMAL)
    assert load().server.wired == wired


def test_what_the_engine_process_is_told() -> None:
    written(
        "server: {prefill_share: 0.5, longest_gap: 0.2, wired: never, concurrency: 3}\n" + MINIMAL
    )
    client = create_app(load()).state.pool.engines[0]._spawn()
    arguments = decode_worker_arguments(encode_arguments(client._process._arguments))
    assert arguments.schedule == Schedule(prefill_share=0.5, longest_gap=0.2)
    assert (arguments.wired, arguments.concurrency) == ("never", 3)


@pytest.mark.parametrize("size", ["0", "-1", "always", "12 TB", "true", "[]", "null"])
def test_other_ways_to_wire_are_told(size: str) -> None:
    found = problem(f"server: {{wired: {size}}}\n" + MINIMAL)
    assert (found.line, "wired" in str(found)) == (1, True)


def test_whether_a_mac_is_kept_awake() -> None:
    written("server: {keep_awake: false}\n" + MINIMAL)
    assert load().server.keep_awake is False
    assert "keep_awake" in str(problem("server: {keep_awake: sometimes}\n" + MINIMAL))


@pytest.mark.parametrize("key", ["wait_seconds: 0", "wait_seconds: -1", "wait_seconds: .inf"])
def test_waiting_is_bounded(key: str) -> None:
    assert "wait_seconds" in str(problem(f"server: {{{key}}}\n" + MINIMAL))


@pytest.mark.parametrize("key", ["ttl: 0", "ttl: -5", "ttl: soon", "pinned: 1", "preload: 2"])
def test_how_long_a_model_stays_is_checked(key: str) -> None:
    found = problem(f"models: {{m: {{source: org/name, {key}}}}}")
    assert key.partition(":")[0] in str(found)


def test_a_replay_model_has_its_files_beside_models_yaml(folder: Path) -> None:
    written("models: {m: {source: 'replay:here.jsonl', tokenizer: ./none}}")
    assert "no tokenizer.json in" in str(check_file(folder / "models.yaml")[0])
    written("models: {m: {source: 'replay:here.jsonl', tokenizer: 5}}")
    assert "tokenizer" in str(check_file(folder / "models.yaml")[0])
    written("models: {m: {source: 'replay:here.jsonl', family: plain}}")
    assert load().models["m"].source == f"replay:{folder / 'here.jsonl'}"
    assert load().models["m"].tokenizer is None


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


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert load(overrides={"host": host}).server.host == host


def test_the_file_that_ships_is_right_and_shows_every_key(folder: Path) -> None:
    text = (ROOT / "models.yaml").read_text()
    assert problems_of(text) == []
    assert load().models["smollm2-135m"].source == "demo:smollm2"

    written("", "qwen3.jinja")
    (folder / "models" / "qwen3").mkdir(parents=True)
    written("", "models/qwen3/tokenizer.json")
    (folder / "adapters").mkdir()
    (folder / "lora").mkdir()
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "localhost", "ips": ["127.0.0.1"]}]
    written(json.dumps(hosts), "hosts.json")
    shown = re.sub(r"^( *)# ( *[\w-]+:)", r"\1\2", text, flags=re.MULTILINE)
    assert problems_of(shown) == []
    settings = load()
    qwen, fake = settings.models["qwen3"], settings.models["fake"]
    assert settings.server.model_fields_set == set(type(settings.server).model_fields)
    cached = settings.server.prompt_cache
    assert cached.model_fields_set == set(type(cached).model_fields)
    cloud, granite = settings.models["gpt-oss-cloud"], settings.models["granite-cloud"]
    big = settings.models["big"]
    assert big.distributed
    assert big.distributed.model_fields_set == set(type(big.distributed).model_fields)
    shown_keys = {
        key for each in (qwen, fake, big, cloud, granite) for key in each.model_fields_set
    }
    shown_keys |= {"preload", "space_id", "iam_url"}
    assert shown_keys == set(type(qwen).model_fields)
    for group in (cloud.capabilities, cloud.upstream):
        assert group.model_fields_set == set(type(group).model_fields)
    assert cloud.capabilities == CapabilitySettings.model_validate(asdict(UpstreamCapabilities()))
    assert fake.source == f"replay:{folder / 'answers.yaml'}"
    assert fake.tokenizer == folder / "models" / "qwen3"
    assert qwen.defaults.model_fields_set == set(type(qwen.defaults).model_fields)
    assert settings.store.model_fields_set == set(type(settings.store).model_fields)
    shown_keys = {key for each in settings.connectors.values() for key in each.model_fields_set}
    assert shown_keys == set(ConnectorSettings.model_fields)
    oauth = settings.connectors["tickets"].oauth
    assert oauth
    assert oauth.model_fields_set == set(OAuthSettings.model_fields)
    login = settings.connectors["drive"].login
    assert login
    assert login.model_fields_set == set(LoginSettings.model_fields)
    legal, support = qwen.adapters["legal"], qwen.adapters["support"]
    assert legal.model_fields_set == set(type(legal).model_fields)
    assert (support.path, support.pinned) == (str(folder / "lora" / "support"), False)


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
    assert load(written(logins)).connectors["a"].login == LoginSettings()
    for wrong, message in {
        "{}": "should have either a `url` or a `command`",
        "{url: 'https://x', command: y}": "should have either a `url` or a `command`",
        "{url: 'https://x', args: [y]}": "`args` needs a `command`",
        "{command: x, allow_private: true}": "`allow_private` needs a `url`",
        "{url: 'file:///etc/passwd'}": "should be an http or https URL",
        "{comand: x}": "unknown key: did you mean `command`?",
        "{command: x, oauth: {issuer: 'https://i', client_id: a, client_secret: b}}": (
            "`oauth` needs a `url`"
        ),
        "{command: x, login: true}": "`login` needs a `url`",
        "{url: 'https://x', login: {client_secret: b}}": "needs a `client_id` and an `issuer`",
        "{url: 'https://x', login: {prot: 1}}": "unknown key: did you mean `port`?",
        "{url: 'https://x', login: true, oauth: {issuer: 'https://i', client_id: a, "
        "client_secret: b}}": "should have either `oauth` or `login`",
    }.items():
        assert message in str(problem(f"connectors:\n  a: {wrong}\n"))


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
    entries = "a: ./lora/a, b: org/b, c: {path: /c, pinned: true, allow_other_base: true}"
    written(f"models:\n  m: {{source: demo:smollm2, adapters: {{{entries}}}}}\n")
    a, b, c = load().models["m"].adapters.values()
    assert (a.path, b.path, c.path) == (str(folder / "lora" / "a"), "org/b", "/c")
    assert (a.pinned, a.allow_other_base, c.pinned, c.allow_other_base) == (
        False,
        False,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("a: {pth: x, path: y}", "models.m.adapters.a.pth: unknown key: did you mean `path`?"),
        ("a: {pinned: true}", "models.m.adapters.a.path: is missing"),
        ("a: 3", "models.m.adapters.a: should be a mapping"),
        ("a: {path: x, pinned: 1}", "models.m.adapters.a.pinned: should be a valid boolean"),
        ("'a:b': x", "models.m.adapters.a:b: should be letters, digits"),
        ("../a: x", "models.m.adapters.../a: should be letters, digits"),
    ],
)
def test_mistakes_in_adapters_are_told(entry: str, message: str) -> None:
    text = f"models:\n  m:\n    source: demo:smollm2\n    adapters:\n      {entry}\n"
    (line, said), *rest = problems_of(text)
    assert said.startswith(message) or any(s.startswith(message) for _, s in rest)
    assert line == 5


@pytest.mark.parametrize("key", ["adapters_dir: nowhere", "adapter_dirs: [nowhere]"])
def test_folders_of_adapters_must_be_there(folder: Path, key: str) -> None:
    assert "no such folder: 'nowhere'" in str(problem(f"server: {{{key}}}\n"))


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("auto", limits.AHEAD_TOKENS.value), ("never", 0), ("0", 0), ("300", 300)],
)
def test_what_is_computed_ahead_is_a_number_of_tokens(given: str, tokens: int) -> None:
    path = written(f"models:\n  a: {{source: demo:smollm2, compute_ahead: {given}}}\n")
    assert load(path).models["a"].compute_ahead == tokens


@pytest.mark.parametrize("given", ["always", "-1", "1.5", "true", "4294967296", "[1]", "'1'"])
def test_other_amounts_are_told(given: str) -> None:
    text = f"models:\n  a: {{source: demo:smollm2, compute_ahead: {given}}}\n"
    assert problem(text).message == "should be auto, never or a number of tokens"


def test_keys_and_values_are_kept_in_some_bits() -> None:
    path = written("models:\n  a: {source: x/y, kv_cache: {bits: 8}}\n  b: {source: x/z}\n")
    assert [model.kv_cache.bits for model in load(path).models.values()] == [8, 16]


@pytest.mark.parametrize("bits", ["0", "3", "5", "32", "-8", "'8'", "8.5", "true", "1e9", "[8]"])
def test_other_bits_are_told(bits: str) -> None:
    found = problem(f"models:\n  a: {{source: x/y, kv_cache: {{bits: {bits}}}}}\n")
    assert "models.a.kv_cache.bits" in str(found)


@pytest.mark.parametrize("given", ["8", "{bit: 8}"])
def test_bits_have_a_key_of_their_own(given: str) -> None:
    found = problem(f"models:\n  a: {{source: x/y, kv_cache: {given}}}\n")
    assert "models.a.kv_cache" in str(found)


def test_where_responses_are_stored(folder: Path) -> None:
    path = written("store: {data_dir: kept, days: 2}\n" + MINIMAL)
    store = load(path).store
    assert (store.data_dir, store.days, store.count) == (folder / "kept", 2, 10_000)
    assert load(path, MLX_SERVER_DATA="there").store.data_dir == folder / "there"
    path.unlink()
    assert load().store.data_dir == Path("~/.local/share/mlx-server").expanduser()
    assert Settings().store.data_dir is None, "made in a program, it leaves nothing behind"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("data_di: x", "store.data_di: unknown key: did you mean `data_dir`?"),
        ("days: 0", "store.days: should be greater than 0"),
        ("count: 1.5", "store.count: should be a valid integer"),
        ("data_dir: 3", "store.data_dir: should be"),
    ],
)
def test_mistakes_in_the_store_are_told(entry: str, message: str) -> None:
    assert str(problem(f"store: {{{entry}}}\n")).startswith(message)
