"""The settings of the server, its store and its models; `models_yaml` loads them."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from mlx_server import limits
from mlx_server.config.connectors import ConnectorSettings
from mlx_server.config.distributed import DistributedSettings
from mlx_server.config.frozen import FROZEN
from mlx_server.config.upstream import UpstreamFields, located_upstream
from mlx_server.config.values import Bytes, BytesOrNone, absolute, size_in_bytes
from mlx_server.errors import SettingsError
from mlx_server.sources.kinds import SCHEME, why_impossible
from mlx_server.upstream.spec import is_upstream

STORE_FILE = "responses.sqlite3"
PROMPT_FOLDER = "prompts"
"""A file and a folder in the data directory."""

REPLAY = "replay:"


def _printable(text: str) -> str:
    if text and text.isprintable() and text == text.strip() and len(text) <= 256:
        return text
    raise ValueError("should be 1 to 256 printable characters, without spaces at either end")


def _key(key: SecretStr) -> SecretStr:
    if re.fullmatch(r"[!-~]+", key.get_secret_value()):
        return key
    raise ValueError("a key should be one or more visible ASCII characters")


def located(source: str, info: ValidationInfo | None) -> str:
    """Makes a path absolute; leaves `demo:...` and hub ids as they are."""
    if is_upstream(source):
        return located_upstream(source)
    if source.startswith(REPLAY):
        return REPLAY + absolute(source.removeprefix(REPLAY), info)
    path = absolute(source, info)
    if SCHEME.match(source) and not os.path.exists(path):
        if why := why_impossible(source):
            raise ValueError(why)
        return source
    is_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) and not os.path.exists(path)
    return source if is_hub_id else path


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


def _wired(size: object) -> object:
    if size in ("auto", "never"):
        return size
    with suppress(ValueError):
        nbytes = size_in_bytes(size)
        if type(nbytes) is int and nbytes > 0:
            return nbytes
    raise ValueError("should be auto, never or a size such as 20GB")


def _ahead(tokens: object) -> object:
    known = {"auto": limits.AHEAD_TOKENS, "never": 0}
    if isinstance(tokens, str) and tokens in known:
        return known[tokens]
    if type(tokens) is int and 0 <= tokens < 2**31:
        return tokens
    raise ValueError("should be auto, never or a number of tokens")


def _tokenizer(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    found = Path(absolute(path, info))
    if os.path.isfile(found / "tokenizer.json"):
        return found
    raise ValueError(f"no tokenizer.json in {found.name!r}")


def _template(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    found = Path(absolute(path, info))
    if os.path.isfile(found):
        return found
    raise ValueError(f"no such file: {found.name!r}")


def _folder(path: object, info: ValidationInfo) -> object:
    if not isinstance(path, str):
        return path
    found = Path(absolute(path, info))
    if os.path.isdir(found):
        return found
    raise ValueError(f"no such folder: {found.name!r}")


def _data_dir(path: object, info: ValidationInfo) -> object:
    return Path(absolute(path, info)) if isinstance(path, str) and path else path


def _adapter_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,127}", name, re.ASCII):
        return name
    raise ValueError(
        "should be letters, digits, `.`, `_`, `+` and `-`, starting with a letter or digit"
    )


def _adapter(entry: object) -> object:
    """A text is short for an adapter with this `path`."""
    return {"path": entry} if isinstance(entry, str) else entry


Name = Annotated[str, AfterValidator(_printable)]
Source = Annotated[str, Field(min_length=1), AfterValidator(located)]
Folder = Annotated[Path, BeforeValidator(_folder)]
TagName = Annotated[str, Field(pattern=r"^[\w:-]{1,64}$")]
"""A tag's name, without its brackets."""

AdapterName = Annotated[str, AfterValidator(_adapter_name)]
Wired = Annotated[Literal["auto", "never"] | int, BeforeValidator(_wired)]
ComputeAhead = Annotated[int, BeforeValidator(_ahead)]
Key = Annotated[SecretStr, AfterValidator(_key)]


class _Frozen(BaseModel):
    model_config = FROZEN


class PromptCacheSettings(_Frozen):
    memory: BytesOrNone | None = None
    """The limit in bytes; None: what models and answers leave of the memory budget."""
    disk: BytesOrNone = limits.PROMPT_FILE_BYTES
    """The limit in bytes, as the disk counts them; 0: nothing is written."""
    folder: Annotated[Path | None, BeforeValidator(_data_dir)] = None
    """The folder of the files; None: one in the data directory."""


class ServerSettings(_Frozen):
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    concurrency: int = Field(default=limits.CONCURRENCY, ge=1, le=256)
    """Rows decoded in one batch."""
    queue: int = Field(default=limits.QUEUE, ge=0)
    """How many answers of one client may wait for a place in the batch."""
    prefill_share: float = Field(default=0.8, ge=0.1, le=0.95)
    """Largest share of the time that prefill gets while answers stream."""
    longest_gap: float = Field(default=0.3, ge=0.02, le=10)
    """How many seconds a stream may pause while another prompt is prefilled."""
    api_keys: tuple[Key, ...] = ()
    allowed_hosts: tuple[Name, ...] = ()
    """Host headers, without a port, that are accepted in addition to the loopback names."""
    allowed_origins: tuple[Name, ...] = ()
    """Web origins that may send requests; CORS is off if there are none."""
    allow_insecure: bool = False
    """Whether other machines are served without a key."""
    drain_seconds: float = Field(default=10.0, ge=0)
    max_body_bytes: int = Field(default=limits.BODY_BYTES, gt=0)
    receive_seconds: float = Field(default=float(limits.RECEIVE_SECONDS), gt=0)
    """How long the head and body of a request may take to arrive."""
    send_seconds: float = Field(default=float(limits.SEND_SECONDS), gt=0)
    """How long a client may leave sent bytes unread before its connection is cut."""
    memory_budget: Bytes | None = None
    """Bytes for weights and caches; None: derived from the machine's memory."""
    wired: Wired = "auto"
    """Bytes of weights that macOS must not page out; auto: weights that are large for the Mac."""
    keep_awake: bool = True
    """Whether a Mac stays awake while it generates."""
    prompt_cache: PromptCacheSettings = PromptCacheSettings()
    prompt_cache_bytes: BytesOrNone | None = None
    """The older name of `prompt_cache.memory`."""
    wait_seconds: float = Field(default=float(limits.WAIT_SECONDS), gt=0)
    """How long a request may wait for memory that other requests hold."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    adapters_dir: Folder | None = None
    """Each folder in it is an adapter, offered with every model that it fits."""
    runtime_adapters: bool = False
    """Whether clients may load and unload adapters."""
    adapter_dirs: tuple[Folder, ...] = ()
    """Folders from which they may load them, in addition to `adapters_dir`."""
    page: bool = True
    """Whether browsers get a page at `/`."""
    page_texts: bool = False
    """Whether the page lists what was asked and answered, in memory only."""
    runtime_models: bool = True
    """Whether clients may load and unload models, and say how long they stay; if not, models are
    loaded by the requests that need them."""
    show_prompts: bool = False
    """Whether `/v1/chat/completions/render` shows a request's prompt."""
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "both"
    """The fields of chat completions that hold reasoning: most clients read only one of the names,
    and a few refuse a message with both."""
    allow_private_urls: bool = False
    """Whether requests may use URLs of MCP servers on this machine and its network."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.prompt_cache_bytes is not None and self.prompt_cache.memory is not None:
            raise ValueError("`prompt_cache_bytes` and `prompt_cache.memory` are the same setting")
        return self

    @property
    def prompt_cache_memory(self) -> int | None:
        """Limit of the prompt cache in memory; None: what models and answers leave."""
        own, older = self.prompt_cache.memory, self.prompt_cache_bytes
        return older if own is None else own


class SamplingDefaults(_Frozen):
    """Defaults for requests that leave a field unset; None: the model's own default."""

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
    """An absolute path or a hub id."""
    pinned: bool = False
    """Whether it is never evicted."""
    allow_other_base: bool = False
    """Whether it is served if its shapes fit, even if its config names another base model."""
    description: Annotated[str, Field(max_length=1000)] | None = None
    """A sentence for clients, in `/v1/models`."""


class RepairSettings(_Frozen):
    """See mlx_server.repair.allowed.RepairPolicy, which has the same fields."""

    names: bool = True
    json_: bool = Field(default=True, alias="json")  # pydantic has a `json` of its own
    coerce: bool = True
    promote_reasoning: bool = True
    retries: int = Field(default=1, ge=0, le=4)
    repeats: int | None = Field(default=None, ge=1, le=1000)
    loops: Annotated[
        Annotated[int, Field(ge=2, le=1000)] | None, BeforeValidator(_number_or_off)
    ] = 6
    continuations: int = Field(default=1, ge=0, le=4)
    streaming: Literal["live", "accumulate"] = "live"


class KvCacheSettings(_Frozen):
    bits: Literal[4, 8, 16] = 16
    """The bits in which keys and values are kept; 16: as they are computed. 4 is an experiment."""


class ModelSettings(_Frozen, UpstreamFields):
    source: Source
    """An absolute path, a hub id, `demo:smollm2`, `replay:` followed by an absolute path, or the
    URL of another server: `openai+https://...` or `watsonx:https://...`."""
    revision: Annotated[str, Field(pattern=r"^[\w][\w./-]*$", max_length=250)] | None = None
    """Branch, tag or commit of a hub id."""
    family: Annotated[Name, AfterValidator(_family)] | None = None
    chat_template: Annotated[Path | None, BeforeValidator(_template)] = None
    aliases: tuple[Name, ...] = ()
    context_length: int | None = Field(default=None, gt=0)
    tokenizer: Annotated[Path | None, BeforeValidator(_tokenizer)] = None
    """A folder with a tokenizer.json, for a replay model."""
    template_kwargs: dict[Name, Any] = {}
    """Defaults for `chat_template_kwargs`."""
    lead_on: bool = True
    """Whether an answer that stops after its reasoning is continued to its text."""
    constrain_calls: bool | None = None
    """Whether a grammar makes calls that the model begins by itself follow their tool's schema.
    None: yes, except for replay models, which play what was recorded."""
    include_raw: Literal["auto", "always", "never"] = "auto"
    """Whether answers have the model's raw output; auto: where a request sets `include_raw`."""
    tools_in_prompt: Literal["auto", "never"] = "auto"
    """Whether tools are described in the system prompt if the chat template has no place for
    them."""
    schema_in_prompt: Literal["auto", "never"] = "auto"
    """Whether the prompt describes the schema that an answer must follow."""
    json_whitespace: Literal["lines", "blanks"] = "lines"
    """What may stand between the parts of JSON that has a schema: line breaks and indentation too,
    or single blanks only."""
    compute_ahead: ComputeAhead = limits.AHEAD_TOKENS
    """How many tokens of a conversation's next prompt an idle engine computes at most."""
    kv_cache: KvCacheSettings = KvCacheSettings()
    images: Literal["describe", "refuse"] = "describe"
    """Whether a question with images, or other media, that the model can't take is answered, with a
    line of text in their place, or refused. Those of earlier turns are never refused."""
    volatile_lines: Literal["drop", "keep"] = "drop"
    """Whether lines that change with every request and mean nothing are taken out of the prompt."""
    misplaced_calls: Literal["make", "text"] = "make"
    """Whether calls that the model writes as JSON, instead of in its own format, are made."""
    reasoning_tags: tuple[TagName, ...] | None = None
    """Tags in which the model writes its reasoning, in addition to those of its family."""
    repair: RepairSettings = RepairSettings()
    task: Literal["generate", "embed", "rerank"] | None = None
    """The task of the model; None takes the one that its files show."""
    matryoshka: bool = False
    """Whether `dimensions` may shorten its embeddings, even if its files do not say so."""
    preload: bool = False
    pinned: bool = False
    """Whether it is never evicted."""
    ttl: float | None = Field(default=None, gt=0)
    """The model is unloaded after so many seconds without a request."""
    defaults: SamplingDefaults = SamplingDefaults()
    adapters: dict[AdapterName, Annotated[AdapterSettings, BeforeValidator(_adapter)]] = {}
    """Adapters of this model, in addition to those in `adapters_dir` that fit."""
    distributed: DistributedSettings | None = None
    """The machines over which the model is split; None keeps it on this one."""

    @property
    def has_weights(self) -> bool:
        """Whether this server loads weights for it."""
        return not (is_upstream(self.source) or self.source.startswith(REPLAY))

    @model_validator(mode="after")
    def _can_be_split(self) -> Self:
        if self.distributed and not self.has_weights:
            raise ValueError("`distributed` needs a `source` that is a folder or a hub id")
        if self.distributed and self.adapters:
            raise ValueError("a model with `distributed` can't have `adapters` yet")
        return self


class StoreSettings(_Frozen):
    data_dir: Annotated[Path | None, BeforeValidator(_data_dir)] = None
    """Folder of the database; None: a temporary folder, deleted when the server ends."""
    days: float = Field(default=30, gt=0)
    """How long responses and conversations are kept."""
    count: int = Field(default=limits.STORED_RESPONSES, ge=1)
    """How many responses, and how many conversations, are kept."""
    bytes: Bytes = limits.STORE_BYTES
    """The most bytes that are stored for all clients together."""
    bytes_per_key: Bytes = limits.STORE_BYTES_PER_KEY
    """The most bytes that are stored for the clients that share a key."""

    @property
    def path(self) -> Path:
        assert self.data_dir is not None
        return self.data_dir / STORE_FILE


class Settings(_Frozen):
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    models: dict[Name, ModelSettings] = {}
    connectors: dict[Name, ConnectorSettings] = {}
    """MCP servers that requests may use by these names."""

    @property
    def prompt_folder(self) -> Path | None:
        """The folder of the prompt cache's files; None: they are not kept."""
        return self.kept_prompt_folder if self.server.prompt_cache.disk else None

    @property
    def kept_prompt_folder(self) -> Path | None:
        """The folder that has the prompt cache's files, also those that an earlier setting left."""
        data = self.store.data_dir
        return self.server.prompt_cache.folder or (data / PROMPT_FOLDER if data else None)
