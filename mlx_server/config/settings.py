"""The settings of the server, its store, its models and its connectors; `models_yaml` loads them.

A part that uses settings declares them, with their defaults and what they mean. Here are
those of no part, and how texts become values such as paths and sizes.
"""

import os
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationInfo,
    WrapValidator,
)
from pydantic_core import CoreConfig, SchemaValidator

from mlx_server import limits
from mlx_server.config.hostfile import Hostfile, load_hostfile, matching, mistakes
from mlx_server.engine.worker_arguments import (
    FIRST_PORT,
    NO_DISK,
    Backend,
    Mode,
    PromptDisk,
    RankGroup,
    RankHost,
)
from mlx_server.errors import SettingsError
from mlx_server.mcp import ClientCredentials, Connector, StoredLogin
from mlx_server.mcp.addresses import names_private_host
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.prepare import AdapterSource, ModelOptions, ModelSpec
from mlx_server.requests import RepairPolicy, SamplingChoices, Tier
from mlx_server.sources.cache import cache_dir
from mlx_server.sources.kinds import SCHEME, why_impossible
from mlx_server.store import Retention
from mlx_server.upstream.spec import (
    UpstreamCapabilities,
    UpstreamPolicy,
    UpstreamSpec,
    capabilities_of,
    is_upstream,
    kind_and_url,
)

STORE_FILE = "responses.sqlite3"
PROMPT_FOLDER = "prompts"
"""A file and a folder in the data directory."""

REPLAY = "replay:"
AT_LEAST = 2
"""The machines over which a model is split."""

T = TypeVar("T")

# How values are read


@lru_cache(maxsize=16)
def _validator(kind: Hashable) -> SchemaValidator:
    """Strict validation wants each record as an object; here it may be a mapping."""
    schema = TypeAdapter(cast(type, kind)).core_schema
    _take_mappings(schema)
    return SchemaValidator(schema, CoreConfig(hide_input_in_errors=True))


def _take_mappings(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "dataclass":
            schema["strict"] = False
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _take_mappings(part)


def validated(kind: type[T], data: object, folder: Path = Path()) -> T:
    """Makes a record of settings. folder: paths are relative to it. Raises ValidationError."""
    record: T = _validator(cast(Hashable, kind)).validate_python(data, context=folder)
    return record


def values(record: Any, of: Any = None) -> dict[str, Any]:
    """The values of a dataclass by their names. of: a dataclass that has those that are wanted."""
    return {each.name: getattr(record, each.name) for each in fields(of or record)}


def absolute(path: str, info: ValidationInfo | None) -> str:
    folder = info.context if info and isinstance(info.context, Path) else Path()
    return os.path.abspath(folder / os.path.expanduser(path))


def size_in_bytes(size: object) -> object:
    """Converts a size such as `12GB` to bytes."""
    if not isinstance(size, str):
        return size
    if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(MB|GB)", size):
        return int(Decimal(found[1]) * {"MB": 10**6, "GB": 10**9}[found[2]])
    raise ValueError("should be a size such as 12GB or 800MB")


def _printable(text: str) -> str:
    if text and text.isprintable() and text == text.strip() and len(text) <= 256:
        return text
    raise ValueError("should be 1 to 256 printable characters, without spaces at either end")


class ApiKey(SecretStr):
    """A key, and the tier of its requests."""

    tier = Tier.DEFAULT


KEY_TIERS = {tier.label: tier for tier in (Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX)}


def _key(value: object, validate: Callable[[object], SecretStr]) -> ApiKey:
    """Reads `KEY`, or `KEY: tier`."""
    if isinstance(value, ApiKey):  # settings are made again with those of flags
        return value
    tier: object = Tier.DEFAULT.label
    if isinstance(value, dict) and len(value) == 1:
        ((value, tier),) = value.items()
    key = ApiKey(validate(value).get_secret_value())
    if not re.fullmatch(r"[!-~]+", key.get_secret_value()):
        raise ValueError("a key should be one or more visible ASCII characters")
    if tier not in KEY_TIERS:
        raise ValueError("a key's tier should be `priority`, `default` or `flex`")
    key.tier = KEY_TIERS[str(tier)]
    return key


URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[\w./~%-]*)?", re.ASCII)


def located(source: str, info: ValidationInfo | None) -> str:
    """Makes a path absolute; leaves `demo:...` and hub ids as they are."""
    if is_upstream(source):
        return _located_upstream(source)
    if source.startswith(REPLAY):
        return REPLAY + absolute(source.removeprefix(REPLAY), info)
    path = absolute(source, info)
    if SCHEME.match(source) and not os.path.exists(path):
        if why := why_impossible(source):
            raise ValueError(why)
        return source
    is_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) and not os.path.exists(path)
    return source if is_hub_id else path


def _located_upstream(source: str) -> str:
    kind, url = kind_and_url(source)
    if URL.fullmatch(url):
        return source
    if "@" in url or "?" in url:  # the message must not show it
        raise ValueError(
            "the URL of another server should have no user, password or query; name the variable "
            "that has the key as `api_key_env`"
        )
    prefix = "openai+" if kind == "openai" else "watsonx:"
    raise ValueError(f"should be `{prefix}` followed by an http or https URL")


def _number_or_off(value: object) -> object:
    if value in ("off", False):  # YAML reads a bare `off` as false
        return None
    if value is None or value is True:
        raise ValueError("should be a number of repeats, or off")
    return value


def _family(name: str) -> str:
    from mlx_server.families import family_named  # here, since most models name none

    try:
        return family_named(name).name
    except SettingsError as error:
        raise ValueError(error.message) from None


def _ahead(tokens: object) -> object:
    known = {"auto": limits.AHEAD_TOKENS, "never": 0}
    if isinstance(tokens, str) and tokens in known:
        return known[tokens]
    if type(tokens) is int and 0 <= tokens < 2**31:
        return tokens
    raise ValueError("should be auto, never or a number of tokens")


def _template(path: object, info: ValidationInfo) -> object:
    """The text of the file."""
    if not isinstance(path, str):
        return path
    file = Path(absolute(path, info))
    if not os.path.isfile(file):
        raise ValueError(f"no such file: {file.name!r}")
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"the file {file.name!r} can't be read as UTF-8 text") from None


def _folder(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    folder = Path(absolute(path, info))
    if os.path.isdir(folder):
        return folder
    raise ValueError(f"no such folder: {folder.name!r}")


def _data_dir(path: object, info: ValidationInfo) -> object:
    return Path(absolute(path, info)) if isinstance(path, str) and path else path


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,127}", re.ASCII)
LETTERS = "should be letters, digits, `.`, `_`, `+` and `-`, starting with a letter or digit"


def _adapter(entry: object) -> object:
    """A text is short for an adapter with this `path`."""
    return {"path": entry} if isinstance(entry, str) else entry


def _program(command: str, info: ValidationInfo) -> str:
    return absolute(command, info) if "/" in command else command


def _hosts(hosts: object, info: ValidationInfo) -> object:
    """The path of a hostfile is read; a list is as in the file."""
    if not isinstance(hosts, str):
        return {"hosts": hosts} if isinstance(hosts, list | tuple) else hosts
    try:
        return load_hostfile(Path(absolute(hosts, info)))
    except SettingsError as error:
        raise ValueError(str(error)) from None


Bytes = Annotated[int, Field(gt=0), BeforeValidator(size_in_bytes)]
BytesOrNone = Annotated[int, Field(ge=0), BeforeValidator(size_in_bytes)]
Name = Annotated[str, AfterValidator(_printable)]
Source = Annotated[str, Field(min_length=1), AfterValidator(located)]
Folder = Annotated[Path, BeforeValidator(_folder)]

AdapterName = Annotated[str, matching(ADAPTER_NAME, LETTERS)]
Key = Annotated[SecretStr, WrapValidator(_key)]
Text = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[!-~]+$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
HttpUrl = Annotated[str, matching(re.compile(r"https?://[!-~]+"), "should be an http or https URL")]


class Strict:
    """How all settings are validated."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # the input may be a key
    )


# The server and its store


@dataclass(frozen=True)
class PromptCacheSettings(Strict):
    memory: BytesOrNone | None = None
    """The limit in bytes; None: what models and answers leave of the memory budget."""
    disk: BytesOrNone = limits.PROMPT_FILE_BYTES
    """The limit in bytes, as the disk counts them; 0: nothing is written."""
    disk_writes_per_day: BytesOrNone = limits.PROMPT_WRITES_PER_DAY
    """The bytes that all servers of the data directory may write there in a day."""


PagePart = Literal["texts", "conversations"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Strict):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on; 0 picks a free one."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = limits.CONCURRENCY
    """Rows decoded in one batch."""
    api_keys: tuple[Key, ...] = ()
    allowed_hosts: tuple[Name, ...] = ()
    """Host headers, without a port, that are accepted in addition to the loopback names."""
    allowed_origins: tuple[Name, ...] = ()
    """Web origins that may send requests; CORS is off if there are none."""
    allow_insecure: bool = False
    """Whether other machines are served without a key."""
    drain_seconds: Annotated[float, Field(ge=0)] = 10.0
    """How long running answers may go on when the server stops."""
    max_body_bytes: Annotated[int, Field(gt=0)] = limits.BODY_BYTES
    """The most bytes of a request's body."""
    receive_seconds: Annotated[float, Field(gt=0)] = float(limits.RECEIVE_SECONDS)
    """How long the head and body of a request may take to arrive."""
    tier_wait: Annotated[float, Field(gt=0)] = float(limits.TIER_WAIT_SECONDS)
    """Seconds after which a request of a lower tier gets its next token in spite of higher ones."""
    memory_budget: Bytes | None = None
    """Bytes for weights and caches; None: derived from the machine's memory."""
    prompt_cache: PromptCacheSettings = PromptCacheSettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    adapters_dir: Folder | None = None
    """Each folder in it is an adapter, offered with every model that it fits."""
    adapter_dirs: tuple[Folder, ...] = ()
    """Folders from which clients may load adapters, and from `adapters_dir`; by default they may
    load none."""
    page: bool | PagePart | Annotated[tuple[PagePart, ...], Field(min_length=1)] = True
    """Whether browsers get a page at `/`. With `texts` it also lists what was asked and answered,
    which is kept in memory only; with `conversations` the server stores those of the page."""
    runtime_models: bool = True
    """Whether clients may load and unload models, and say how long they stay; if not, models are
    loaded by the requests that need them."""
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "both"
    """The fields of chat completions that hold reasoning: most clients read only one of the names,
    and a few refuse a message with both."""
    allow_private_urls: bool = False
    """Whether requests may use URLs of MCP servers on this machine and its network, and whether
    names in `picture_hosts` may lead there."""
    picture_hosts: tuple[Name, ...] = ()
    """Hosts whose pictures are fetched where a request names them by URL; `host:port` for a port
    that is not its scheme's."""

    @property
    def keys(self) -> list[str]:
        return [key.get_secret_value() for key in self.api_keys]

    @property
    def tiers(self) -> dict[str, Tier]:
        """By key."""
        return {key.get_secret_value(): getattr(key, "tier", Tier.DEFAULT) for key in self.api_keys}

    def page_has(self, part: PagePart) -> bool:
        return part == self.page or (isinstance(self.page, tuple) and part in self.page)

    @property
    def folders_of_adapters(self) -> tuple[Path, ...]:
        """The folders inside which a request may name any folder as its adapter."""
        own = (self.adapters_dir,) if self.adapters_dir else ()
        return (*own, *self.adapter_dirs)


@dataclass(frozen=True, kw_only=True)
class StoreSettings(Retention, Strict):
    days: Annotated[float, Field(gt=0)] = 30
    """How long responses and conversations are kept."""
    bytes: Bytes = limits.STORE_BYTES
    """The most bytes that are stored for all clients together, of which those that share a key may
    have half."""
    data_dir: Annotated[Path | None, BeforeValidator(_data_dir)] = None
    """Folder of the database; None: a temporary folder, deleted when the server ends."""

    @property
    def path(self) -> Path:
        assert self.data_dir is not None
        return self.data_dir / STORE_FILE


# Models


@dataclass(frozen=True)
class SamplingDefaults(Strict):
    """Defaults for requests that leave a field unset; None: the model's own default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None

    @property
    def choices(self) -> SamplingChoices:
        """The sampling parameters that are set, without `max_tokens`."""
        chosen = {name: value for name, value in values(self).items() if value is not None}
        chosen.pop("max_tokens", None)
        return cast(SamplingChoices, chosen)


@dataclass(frozen=True)
class AdapterSettings(AdapterSource, Strict):
    path: Source
    """An absolute path or a hub id."""


@dataclass(frozen=True)
class RepairSettings(RepairPolicy, Strict):
    loops: Annotated[
        Annotated[int, Field(ge=2, le=1000)] | None, BeforeValidator(_number_or_off)
    ] = 6


@dataclass(frozen=True)
class DistributedSettings(Strict):
    hosts: Annotated[Hostfile, BeforeValidator(_hosts)]
    """The path of a hostfile of `mlx.launch`, or its list. This server runs on the first host."""
    mode: Mode = "tensor"
    """Whether each machine has a part of every layer, or some of the layers."""
    port: Annotated[int, Field(ge=1024, le=65000)] | None = None
    """The first port of the ranks' connections; None: from 32323 on, as `mlx.launch`."""
    python: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^/[ -~]*$")] | None = None
    """Python on the other machines; None: the path that it has here."""

    def group(self, port: int) -> RankGroup:
        """port: the first one if the settings name none."""
        file = self.hosts
        backend: Backend = file.backend or "ring"
        variables = ((name, value) for name, _, value in (e.partition("=") for e in file.envs))
        return RankGroup(
            mode=self.mode,
            hosts=tuple(RankHost(h.ssh, h.ips, h.rdma, h.is_local) for h in file.hosts),
            port=self.port or port,
            backend=backend,
            python=self.python or "",
            variables=tuple(variables),
        )


def is_a_group(distributed: DistributedSettings) -> DistributedSettings:
    hosts = distributed.hosts
    if problem := next(mistakes(hosts), None):
        raise ValueError(problem)
    if len(hosts.hosts) < AT_LEAST:
        raise ValueError(f"hosts: should list at least {AT_LEAST} hosts")
    if not all(host.ips for host in hosts.hosts):
        raise ValueError("hosts: each should have `ips`, the addresses of its link")
    return distributed


def _of_its_kind(given: object, info: ValidationInfo) -> object:
    """Adds what a server of its kind can do, where models.yaml does not say."""
    source = info.data.get("source", "")
    if not isinstance(given, Mapping) or not is_upstream(source):
        return given
    for each in fields(UpstreamCapabilities):
        if each.name in given and each.metadata:
            raise ValueError(f"`{each.name}` is no setting: that server's list of models says it")
    return {**values(capabilities_of(source)), **given, "stated": frozenset(given)}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ModelOptions, Strict):
    source: Source
    """An absolute path, a hub id, `demo:smollm2`, `replay:` followed by an absolute path, or the
    URL of another server: `openai+https://...` or `watsonx:https://...`."""
    revision: Annotated[str, Field(pattern=r"^[\w][\w./-]*$", max_length=250)] | None = None
    family: Annotated[Name, AfterValidator(_family)] | None = None
    chat_template: Annotated[str | None, BeforeValidator(_template)] = None
    aliases: tuple[Name, ...] = ()
    context_length: Annotated[int, Field(gt=0)] | None = None
    template_kwargs: dict[Name, Any] = field(default_factory=dict)
    compute_ahead: Annotated[int, BeforeValidator(_ahead)] = limits.AHEAD_TOKENS
    # YAML reads a bare `off` as false
    speculation: Annotated[
        Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = "auto"
    repair: RepairSettings = RepairSettings()
    ttl: Annotated[float, Field(gt=0)] | None = None
    adapters: dict[AdapterName, Annotated[AdapterSettings, BeforeValidator(_adapter)]] = field(
        default_factory=dict
    )
    """Adapters of this model, in addition to those in `adapters_dir` that fit."""
    defaults: SamplingDefaults = SamplingDefaults()
    distributed: Annotated[DistributedSettings, AfterValidator(is_a_group)] | None = None
    """The machines over which the model is split; None keeps it on this one."""
    upstream_model: Text | None = None
    """The model's name on the other server; None: its name here."""
    api_key_env: Variable | None = None
    """The environment variable that has the other server's key."""
    project_id: Text | None = None
    space_id: Text | None = None
    capabilities: Annotated[UpstreamCapabilities | None, BeforeValidator(_of_its_kind)] = None
    """None: what a server of its kind can do."""
    upstream: UpstreamPolicy | None = None
    fallback: tuple[Text, ...] = ()
    """Models that are asked if the other server can't answer."""

    @property
    def has_weights(self) -> bool:
        """Whether this server loads weights for it."""
        return not (is_upstream(self.source) or self.source.startswith(REPLAY))


UPSTREAM_ONLY = (
    "api_key_env", "capabilities", "fallback", "project_id", "space_id", "upstream",
    "upstream_model",
)  # fmt: skip


def fitting(model: ModelSettings) -> ModelSettings:
    """Raises ValueError if the model has settings that don't fit each other."""
    if model.distributed and not model.has_weights:
        raise ValueError("`distributed` needs a `source` that is a folder or a hub id")
    if model.deterministic and not model.has_weights:
        raise ValueError("`deterministic` needs a `source` that is a folder or a hub id")
    if model.distributed and model.adapters:
        raise ValueError("a model with `distributed` can't have `adapters` yet")
    if not is_upstream(model.source):
        for name in UPSTREAM_ONLY:
            if getattr(model, name):
                raise ValueError(f"`{name}` needs a `source` that is another server's URL")
        return model
    kind, _ = kind_and_url(model.source)
    if kind == "watsonx" and (model.project_id is None) == (model.space_id is None):
        raise ValueError("a watsonx model should have either a `project_id` or a `space_id`")
    if kind == "watsonx" and model.api_key_env is None:
        raise ValueError("a watsonx model should have an `api_key_env`")
    return model


# Connectors


@dataclass(frozen=True)
class OAuthSettings(Strict):
    """The client that an authorization server knows. It gets a connector's tokens by its own
    credentials, or by a login of the owner."""

    client_id: Annotated[str, Field(min_length=1)]
    issuer: HttpUrl | None = None
    """The authorization server that knows the client. No other one gets the secret."""
    client_secret: SecretStr | None = None


def credentials(settings: OAuthSettings) -> ClientCredentials:
    secret = settings.client_secret
    return ClientCredentials(
        settings.issuer, settings.client_id, secret.get_secret_value() if secret else None
    )


@dataclass(frozen=True)
class ConnectorSettings(Strict):
    """An MCP server that requests can use: a URL, or a program that is started."""

    url: HttpUrl | None = None
    command: Annotated[str, Field(min_length=1), AfterValidator(_program)] | None = None
    """A path, or a name that is looked up in PATH."""
    args: tuple[str, ...] = ()
    env: dict[str, SecretStr] = field(default_factory=dict)
    headers: dict[str, SecretStr] = field(default_factory=dict)
    oauth: OAuthSettings | None = None
    """None: the authorization server registers clients by itself, or none is needed."""
    login: bool = False
    """Whether the owner logs in with `mlx-server connectors login`."""


def _one_way(connector: ConnectorSettings) -> ConnectorSettings:
    if (connector.url is None) == (connector.command is None):
        raise ValueError("should have either a `url` or a `command`")
    if client := connector.oauth:
        is_complete = client.issuer and client.client_secret
        if not is_complete and (client.client_secret or not connector.login):
            raise ValueError("`oauth` needs an `issuer` and a `client_secret`, or a `login`")
    of_programs, of_urls = ("args", "env"), ("headers", "oauth", "login")
    for name in of_programs if connector.command is None else of_urls:
        if getattr(connector, name):
            raise ValueError(f"`{name}` needs a `{'command' if name in of_programs else 'url'}`")
    return connector


@dataclass(frozen=True, kw_only=True)
class Settings(Strict):
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    models: dict[Name, Annotated[ModelSettings, AfterValidator(fitting)]] = field(
        default_factory=dict
    )
    connectors: dict[Name, Annotated[ConnectorSettings, AfterValidator(_one_way)]] = field(
        default_factory=dict
    )
    """MCP servers that requests may use by these names."""

    @property
    def prompt_folder(self) -> Path | None:
        """The folder of the prompt cache's files; None: they are not kept."""
        return self.kept_prompt_folder if self.server.prompt_cache.disk else None

    @property
    def kept_prompt_folder(self) -> Path | None:
        """The folder that has the prompt cache's files, also those that an earlier setting left."""
        data = self.store.data_dir
        return data / PROMPT_FOLDER if data else None


# The records of other packages


def pool_limits(settings: Settings) -> PoolLimits:
    server, folder = settings.server, settings.prompt_folder
    cache = server.prompt_cache
    return PoolLimits(
        concurrency=server.concurrency,
        tier_wait=server.tier_wait,
        budget=server.memory_budget,
        prompt_cache=cache.memory,
        prompt_disk=PromptDisk(str(folder), cache.disk, cache.disk_writes_per_day)
        if folder
        else NO_DISK,
        curves=cache_dir() / "curves" if settings.store.data_dir else None,
    )


def model_specs(settings: Settings) -> list[ModelSpec]:
    """All models. Groups of which the settings name no port listen on one port after the other."""
    folder, port, specs = settings.server.adapters_dir, FIRST_PORT, []
    for id, model in settings.models.items():
        spec = model_spec(id, model, folder)
        if model.distributed:
            group = model.distributed.group(port)
            port += 0 if model.distributed.port else group.ports
            spec = replace(spec, group=group)
        specs.append(spec)
    return specs


def model_spec(id: str, model: ModelSettings, adapters_dir: Path | None = None) -> ModelSpec:
    options = values(model, ModelOptions)
    return ModelSpec(
        id=id,
        source=model.source,
        max_tokens=model.defaults.max_tokens,
        choices=model.defaults.choices,
        adapters_dir=adapters_dir,
        upstream=_upstream(id, model),
        **options,
    )


def _upstream(id: str, model: ModelSettings) -> UpstreamSpec | None:
    if not is_upstream(model.source):
        return None
    kind, url = kind_and_url(model.source)
    return UpstreamSpec(
        kind=kind,
        url=url,
        model=model.upstream_model or id,
        api_key_env=model.api_key_env,
        project_id=model.project_id,
        space_id=model.space_id,
        capabilities=model.capabilities or capabilities_of(model.source),
        policy=model.upstream or UpstreamPolicy(),
        fallback=model.fallback,
    )


def connector(name: str, settings: ConnectorSettings, data_dir: Path | None) -> Connector:
    client = credentials(settings.oauth) if settings.oauth else None
    return Connector(
        url=settings.url,
        command=(settings.command, *settings.args) if settings.command else (),
        env={name: value.get_secret_value() for name, value in settings.env.items()},
        headers={name: value.get_secret_value() for name, value in settings.headers.items()},
        allow_private=bool(settings.url and names_private_host(settings.url)),
        oauth=stored_login(data_dir, name) if settings.login else client,
    )


def stored_login(data_dir: Path | None, name: str) -> StoredLogin:
    """Raises SettingsError if there is no folder that keeps it."""
    if data_dir is None:
        raise SettingsError(
            f"The connector {name!r} has a `login`, which is kept in the data directory: set "
            "`data_dir` under `store` in models.yaml."
        )
    return StoredLogin.in_folder(data_dir, name)
