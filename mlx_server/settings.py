"""models.yaml, environment and flags -> frozen settings. Every mistake is told with its place."""

import difflib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from mlx_server.errors import SettingsError
from mlx_server.yaml_lines import Loc, Problem, Unreadable, compose, short, where

DEFAULT_FILE = Path("models.yaml")
ADAPTERS_DIR = "adapters"
"""Beside that file, where no other folder is set."""

ENVIRONMENT = {
    "host": "MLX_SERVER_HOST",
    "port": "MLX_SERVER_PORT",
    "api_keys": "MLX_SERVER_API_KEYS",
}
"""Fields of `ServerSettings` and the variables that set them; MLX_SERVER_CONFIG names the file."""

DATA_VARIABLE = "MLX_SERVER_DATA"
DATA_DIR = "~/.local/share/mlx-server"
STORE_FILE = "responses.sqlite3"

REPLAY = "replay:"

Data = Mapping[str, object]


def _printable(text: str) -> str:
    if text and text.isprintable() and text == text.strip() and len(text) <= 256:
        return text
    raise ValueError("should be 1 to 256 printable characters, no white space at the ends")


def _key(key: SecretStr) -> SecretStr:
    if re.fullmatch(r"[!-~]+", key.get_secret_value()):
        return key
    raise ValueError("a key should be one or more visible ASCII characters")


def _absolute(path: str, info: ValidationInfo | None) -> str:
    folder = info.context if info and isinstance(info.context, Path) else Path()
    return os.path.abspath(folder / os.path.expanduser(path))


def _located(source: str, info: ValidationInfo | None) -> str:
    """A path becomes absolute; `demo:...` and what can only be an id of the hub stay as written."""
    if source.startswith(REPLAY):
        return REPLAY + _absolute(source.removeprefix(REPLAY), info)
    if re.match(r"[a-z]\w*:", source):
        return source
    path = _absolute(source, info)
    is_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) and not os.path.exists(path)
    return source if is_hub_id else path


def _bytes(size: object) -> object:
    """`12GB` as well as a number of bytes."""
    if not isinstance(size, str):
        return size
    if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB)", size):
        return int(float(found[1]) * {"MB": 10**6, "GB": 10**9}[found[2]])
    raise ValueError("should be a size such as 12GB or 800MB")


def _tokenizer(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    found = Path(_absolute(path, info))
    if os.path.isfile(found / "tokenizer.json"):
        return found
    raise ValueError(f"no tokenizer.json in {found}")


def _template(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    found = Path(_absolute(path, info))
    if os.path.isfile(found):
        return found
    raise ValueError(f"no such file: {found}")


def _folder(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    found = Path(_absolute(path, info))
    if os.path.isdir(found):
        return found
    raise ValueError(f"no such folder: {found}")


def _data_dir(path: object, info: ValidationInfo) -> object:
    return Path(_absolute(path, info)) if isinstance(path, str) and path else path


def _adapter_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,127}", name, re.ASCII):
        return name
    raise ValueError("should be letters, digits, `.`, `_`, `+` and `-`, the first no sign")


def _adapter(entry: object) -> object:
    """A path or hub id alone stands for an adapter with nothing else said of it."""
    return {"path": entry} if isinstance(entry, str) else entry


def _program(command: str, info: ValidationInfo) -> str:
    return _absolute(command, info) if "/" in command else command


def _http_url(url: str) -> str:
    if re.fullmatch(r"https?://[!-~]+", url):
        return url
    raise ValueError("should be an http or https URL")


Name = Annotated[str, AfterValidator(_printable)]
Source = Annotated[str, Field(min_length=1), AfterValidator(_located)]
Folder = Annotated[Path, BeforeValidator(_folder)]
AdapterName = Annotated[str, AfterValidator(_adapter_name)]
Bytes = Annotated[int, Field(gt=0), BeforeValidator(_bytes)]
Key = Annotated[SecretStr, AfterValidator(_key)]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # the input may be a key
    )


class ServerSettings(_Frozen):
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one."""
    concurrency: int = Field(default=16, ge=1, le=256)
    """Rows decoded together."""
    queue: int = Field(default=64, ge=0)
    """Requests that may wait for a place among those."""
    api_keys: tuple[Key, ...] = ()
    allowed_hosts: tuple[Name, ...] = ()
    """Values of the Host header, without a port, that are served beside the loopback names."""
    allowed_origins: tuple[Name, ...] = ()
    """Web origins that may call; none: no CORS at all."""
    allow_insecure: bool = False
    """Serve other machines without a key."""
    drain_seconds: float = Field(default=10.0, ge=0)
    max_body_bytes: int = Field(default=16 << 20, gt=0)
    receive_seconds: float = Field(default=30.0, gt=0)
    """How long a request may take to arrive, head and body."""
    send_seconds: float = Field(default=30.0, gt=0)
    """How long a client may leave unread what it is sent."""
    memory_budget: Bytes | None = None
    """For weights and caches; None: what suits the machine."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """How long a request may wait for memory that others hold."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    adapters_dir: Folder | None = None
    """Each folder in it is an adapter, for every model that it fits."""
    runtime_adapters: bool = False
    """Clients may load and unload adapters."""
    adapter_dirs: tuple[Folder, ...] = ()
    """Where those may lie, beside `adapters_dir`."""
    allow_private_urls: bool = False
    """Requests may name MCP servers on this machine and its network."""


class SamplingDefaults(_Frozen):
    """What a request for this model gets where it says nothing; None: the model's own default."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, gt=0)


class AdapterSettings(_Frozen):
    path: Source
    """An absolute path or an id of the hub."""
    pinned: bool = False
    """Never dropped to make room."""
    allow_other_base: bool = False
    """Served if its shapes fit, whatever model its config names."""


class RepairSettings(_Frozen):
    """See mlx_server.repair.allowed.Repair, which has the same fields."""

    names: bool = True
    json_: bool = Field(default=True, alias="json")  # pydantic has a `json` of its own
    coerce: bool = True
    promote_reasoning: bool = True
    retries: int = Field(default=1, ge=0, le=4)
    continuations: int = Field(default=1, ge=0, le=4)
    streaming: Literal["live", "accumulate"] = "live"


class ModelSettings(_Frozen):
    source: Source
    """An absolute path, an id of the hub, `demo:smollm2` or `replay:` and an absolute path."""
    family: Name | None = None
    chat_template: Annotated[Path | None, BeforeValidator(_template)] = None
    aliases: tuple[Name, ...] = ()
    context_length: int | None = Field(default=None, gt=0)
    tokenizer: Annotated[Path | None, BeforeValidator(_tokenizer)] = None
    """Of a replay model: a folder with a tokenizer.json."""
    template_kwargs: dict[Name, Any] = {}
    """For chat_template_kwargs that a request does not set."""
    lead_on: bool = True
    """Whether an answer that stops after nothing but reasoning is led on to its text."""
    constrain_calls: bool | None = None
    """Whether calls that a model begins by itself follow their tool's schema. None: those of
    replay models say what was recorded, all others do."""
    repair: RepairSettings = RepairSettings()
    preload: bool = False
    pinned: bool = False
    """Never unloaded to make room."""
    ttl: float | None = Field(default=None, gt=0)
    """Seconds without a request after which it is unloaded."""
    defaults: SamplingDefaults = SamplingDefaults()
    adapters: dict[AdapterName, Annotated[AdapterSettings, BeforeValidator(_adapter)]] = {}
    """Beside those of `adapters_dir` that fit."""


class StoreSettings(_Frozen):
    data_dir: Annotated[Path | None, BeforeValidator(_data_dir)] = None
    """Where it keeps them; None: in a folder that is gone with the server."""
    days: float = Field(default=30, gt=0)
    count: int = Field(default=10_000, ge=1)
    """Of responses, and of conversations."""

    @property
    def path(self) -> Path:
        assert self.data_dir is not None
        return self.data_dir / STORE_FILE


class ConnectorSettings(_Frozen):
    """An MCP server for requests: at a URL, or a program to start."""

    url: Annotated[str, AfterValidator(_http_url)] | None = None
    command: Annotated[str, Field(min_length=1), AfterValidator(_program)] | None = None
    """A path, or a name to be found on the PATH."""
    args: tuple[str, ...] = ()
    env: dict[str, SecretStr] = {}
    headers: dict[str, SecretStr] = {}
    allow_private: bool = False
    """The URL may be on this machine or its network."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError("should have a `url` or a `command`, and not both")
        foreign = ("args", "env") if self.command is None else ("headers", "allow_private")
        for name in foreign:
            if getattr(self, name):
                raise ValueError(f"`{name}` has no meaning without `{_WAYS[name]}`")
        return self


_WAYS = {"args": "command", "env": "command", "headers": "url", "allow_private": "url"}


class Settings(_Frozen):
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    models: dict[Name, ModelSettings] = {}
    connectors: dict[Name, ConnectorSettings] = {}
    """MCP servers that requests may use by these names."""


DEMO = {"smollm2-135m": ModelSettings(source="demo:smollm2", preload=True)}


def _read(path: Path) -> tuple[Data, list[Problem]]:
    try:
        document, data = compose(path)
    except Unreadable as error:
        return {}, [error.problem]
    if not isinstance(data, dict):
        keys = "`server`, `store` and `models`"
        return {}, [Problem(1, "", f"should be a mapping with the keys {keys}")]
    found = _mistakes(data, path.parent)
    told = [Problem(document.line(loc), where(loc), message) for loc, message in found]
    return data, sorted(document.problems + told, key=lambda problem: problem.line)


def check_file(path: Path) -> list[Problem]:
    """Everything that is wrong in this file, in the order of its lines."""
    return _read(path)[1]


_WORDS = {
    "dict_type": "should be a mapping",
    "missing": "is missing",
    "model_type": "should be a mapping",
    "tuple_type": "should be a list",
}

# By depth: `server`, `server.port`, `models.ID.source`, `models.ID.defaults.top_p` and
# `models.ID.repair.json`, `models.ID.adapters.NAME.path`.
_SCHEMAS = (Settings, ServerSettings, ModelSettings, SamplingDefaults, AdapterSettings)


def _mistakes(data: Data, folder: Path) -> Iterator[tuple[Loc, str]]:
    try:
        _checked(data, folder)
    except ValidationError as error:
        for details in error.errors(include_url=False, include_context=False):
            yield tuple(part for part in details["loc"] if part != "[key]"), _in_words(details)
    yield from _clashes(data.get("models"))


def _in_words(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"])
    if kind != "missing" and error["input"] is None:
        return "has no value: give it one or remove the line"
    words = _WORDS.get(kind, error["msg"])
    return words.removeprefix("Value error, ").replace("Input ", "")


def _unknown_key(loc: Loc) -> str:
    schema: type[BaseModel] = _SCHEMAS[len(loc) - 1]
    if loc[0] == "store":
        schema = StoreSettings
    elif loc[0] == "connectors":
        schema = ConnectorSettings
    elif loc[2:3] == ("repair",):
        schema = RepairSettings
    known = [field.alias or name for name, field in schema.model_fields.items()]
    nearest = difflib.get_close_matches(str(loc[-1]), known, n=1)
    if nearest:
        return f"unknown key: did you mean `{nearest[0]}`?"
    return f"unknown key: known here are {', '.join(known)}"


def _clashes(models: object) -> Iterator[tuple[Loc, str]]:
    """Aliases that are taken; two equal ids are duplicate keys already."""
    owners = {name: name for name in models} if isinstance(models, Mapping) else {}
    for loc, alias in _aliases(models):
        if alias in owners:
            yield loc, f"the name is taken by `models.{short(owners[alias])}`"
        owners.setdefault(alias, str(loc[1]))


def _aliases(models: object) -> Iterator[tuple[Loc, str]]:
    for model_id, model in models.items() if isinstance(models, Mapping) else ():
        aliases = model.get("aliases") if isinstance(model, Mapping) else ()
        for i, alias in enumerate(aliases if isinstance(aliases, tuple) else ()):
            if isinstance(alias, str):
                yield ("models", model_id, "aliases", i), alias


def find_file(path: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file named, else MLX_SERVER_CONFIG's, else ./models.yaml if there is one."""
    return _named_file(path, environ) or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


def _named_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    variable = environ.get("MLX_SERVER_CONFIG")
    return path or (Path(variable) if variable else None)


def load_settings(
    path: Path | None,
    *,
    models: Sequence[str] = (),
    overrides: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Flags win over the environment, that over the file; a list is replaced, not added to.

    `models` are paths and ids from the command line. Unless a file was named, they take the place
    of the models of ./models.yaml; what it says about the server holds. `overrides` are fields of
    `ServerSettings`; None: not given.
    """
    file = find_file(path, environ)
    data, problems = _read(file) if file else ({}, [])
    flags = {name: value for name, value in overrides.items() if value is not None}
    environment = _from_environment(environ)
    wrong = [f"{file}:{problem.line or 1}: {problem}" for problem in problems]
    for name, value in environment.items():
        wrong += _wrong(ENVIRONMENT[name], {"server": {name: value}})
    for name, value in flags.items():
        wrong += _wrong(_flag(name), {"server": {name: value}})
    for argument in models:
        wrong += _wrong(repr(argument), {"models": _ad_hoc(argument)})
    if wrong:
        raise SettingsError("\n".join(wrong))

    listed = _checked(data, file.parent if file else Path())
    keep = listed.models if _named_file(path, environ) or not models else {}
    server = {**dict(listed.server), **environment, **flags}
    server["adapters_dir"] = listed.server.adapters_dir or _adapters_beside(file)
    store = {**dict(listed.store), "data_dir": _data_dir_of(listed.store, environ)}
    served = _served(keep, models) or DEMO
    everything = {
        "server": server,
        "store": store,
        "models": served,
        "connectors": listed.connectors,
    }
    settings = _checked(everything, Path())
    _refuse_open_door(settings.server)
    return settings


def _data_dir_of(store: StoreSettings, environ: Mapping[str, str]) -> Path:
    variable = environ.get(DATA_VARIABLE)
    named = Path(_absolute(variable, None)) if variable else store.data_dir
    return named or Path(_absolute(DATA_DIR, None))


def _adapters_beside(file: Path | None) -> Path | None:
    folder = Path(_absolute(str((file or DEFAULT_FILE).parent / ADAPTERS_DIR), None))
    return folder if folder.is_dir() else None


def _checked(data: Data, folder: Path) -> Settings:
    return Settings.model_validate(data, context=folder)


def _wrong(place: str, data: Data) -> list[str]:
    return [f"{place}: {message}" for _, message in _mistakes(data, Path())]


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    texts = {name: environ.get(variable) for name, variable in ENVIRONMENT.items()}
    return {name: _value(name, text) for name, text in texts.items() if text}


def _value(name: str, text: str) -> object:
    if name == "api_keys":
        return tuple(key.strip() for key in text.split(","))
    return int(text) if name == "port" and re.fullmatch(r"-?[0-9]{1,9}", text) else text


def _flag(name: str) -> str:
    return "--api-key" if name == "api_keys" else f"--{name.replace('_', '-')}"


def _ad_hoc(argument: str) -> Data:
    """A model as on the command line: a folder is called by its name, all else as it is written."""
    path = _located(argument, None)
    model_id = Path(path).name if os.path.isabs(path) else argument
    return {model_id: {"source": argument, "preload": True}}


def _served(
    listed: Mapping[str, ModelSettings], arguments: Sequence[str]
) -> dict[str, ModelSettings]:
    served = dict(listed)
    taken = {*listed, *(alias for model in listed.values() for alias in model.aliases)}
    for argument in arguments:
        ((model_id, model),) = _checked({"models": _ad_hoc(argument)}, Path()).models.items()
        if model_id in taken:
            raise SettingsError(f"{argument!r}: there is another model called {model_id!r}")
        taken.add(model_id)
        served[model_id] = model
    return served


def _refuse_open_door(server: ServerSettings) -> None:
    if _is_loopback(server.host) or server.api_keys or server.allow_insecure:
        return
    raise SettingsError(
        f"With host {server.host!r} other machines can reach this server, and it asks for no key. "
        "Set a key (MLX_SERVER_API_KEYS, --api-key or `api_keys` under `server` in models.yaml) "
        "or, if everyone who can reach it may use it, `allow_insecure: true` under `server`."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
