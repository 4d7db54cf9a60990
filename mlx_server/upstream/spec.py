"""The settings of an upstream model, which another server runs, from models.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le

from mlx_server import limits
from mlx_server.messages import Media, MediaKind

Kind = Literal["openai", "watsonx"]

ReasoningField = Literal["reasoning_content", "reasoning"]

PREFIXES: Mapping[str, Kind] = MappingProxyType({"openai+": "openai", "watsonx:": "watsonx"})
"""The prefixes of a `source` that names another server, and the API that each stands for."""


def is_upstream(source: str) -> bool:
    return any(source.startswith(prefix) for prefix in PREFIXES)


def kind_and_url(source: str) -> tuple[Kind, str]:
    for prefix, kind in PREFIXES.items():
        if source.startswith(prefix):
            return kind, source.removeprefix(prefix).rstrip("/")
    raise AssertionError(f"{source!r} is not an upstream")


DERIVED: Mapping[str, bool] = MappingProxyType({"derived": True})
"""Marks fields that the kind of a server, its list of models or its answers tell, and that are no
settings."""


@dataclass(frozen=True, slots=True)
class UpstreamCapabilities:
    """The features of an upstream. A missing one is emulated here, listed as ignored or refused by
    name."""

    tools: bool = True
    """Whether tools are sent. If not, the prompt describes them, calls are parsed in Hermes'
    format, and earlier calls and results are sent as text."""
    tool_choice: bool = field(default=True, metadata=DERIVED)
    """Whether `tool_choice` is sent. Answers are checked for it in any case."""
    parallel_tool_calls: bool = field(default=True, metadata=DERIVED)
    """Whether `parallel_tool_calls` is sent. It is enforced in any case."""
    reasoning_messages: bool | Literal["tool_rounds"] = field(default=False, metadata=DERIVED)
    """Whether the reasoning of earlier messages is sent. With `tool_rounds` only that after the
    user's last message is, as DeepSeek, Kimi and MiniMax require. An answer with reasoning in its
    own field sets it to `tool_rounds`."""
    reasoning_field: ReasoningField = field(default="reasoning_content", metadata=DERIVED)
    """The field in which earlier reasoning is sent."""
    extra_content: bool = field(default=True, metadata=DERIVED)
    """Whether the upstream's own fields of a call are sent back with that call, for example
    Gemini's signatures and OpenRouter's `reasoning_details`."""
    json_schema: bool = True
    """Whether a schema is sent; if not, the prompt describes it. Answers are checked in any
    case."""
    structured_outputs: bool = field(default=False, metadata=DERIVED)
    """Whether a regex, a choice or a grammar is sent, by vLLM's names of these fields."""
    reasoning_effort: bool = field(default=True, metadata=DERIVED)
    chat_template_kwargs: bool = field(default=False, metadata=DERIVED)
    continue_message: bool = field(default=False, metadata=DERIVED)
    """Whether an answer can continue the last message, by vLLM's `continue_final_message`."""
    thinking_budget: bool = field(default=False, metadata=DERIVED)
    """Whether `thinking_budget` is sent, by this server's name of the field. If not, two requests
    limit the thoughts, if a message can be continued."""
    sampling: bool = field(default=True, metadata=DERIVED)
    """Whether `top_k`, `min_p` and `repetition_penalty` are sent, which OpenAI's API lacks."""
    penalties: bool = field(default=True, metadata=DERIVED)
    """Whether `presence_penalty` and `frequency_penalty` are sent."""
    seed: bool = field(default=True, metadata=DERIVED)
    stop: bool = field(default=True, metadata=DERIVED)
    """Whether stop strings are sent. They end an answer in any case."""
    logit_bias: bool = field(default=True, metadata=DERIVED)
    """Whether `logit_bias` is sent. Its token ids are those of the upstream's vocabulary."""
    logprobs: bool = field(default=True, metadata=DERIVED)
    """Whether log probabilities can be requested. They are those of the upstream's tokens."""
    completions: bool = field(default=True, metadata=DERIVED)
    """Whether the upstream has `/completions`, for prompts that are plain text."""
    special_tokens: bool = field(default=False, metadata=DERIVED)
    """Whether its texts have special tokens on request, by vLLM's `skip_special_tokens: false`."""
    stream_usage: bool = field(default=True, metadata=DERIVED)
    """Whether `stream_options` is sent to get the usage."""
    images: bool = False
    """Whether images are sent. In place of other media, and of all that the upstream can't take, it
    gets a line of text."""
    audio: bool = field(default=False, metadata=DERIVED)
    video: bool = field(default=False, metadata=DERIVED)
    developer_role: bool = field(default=False, metadata=DERIVED)
    """Whether messages may have the role `developer`; if not, they are sent as `system`."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = field(
        default="max_tokens", metadata=DERIVED
    )
    stated: frozenset[str] = field(default=frozenset(), metadata=DERIVED)
    """The names of those that models.yaml sets, which an answer of the upstream can't change."""

    def takes(self, medium: Media) -> bool:
        return bool(medium.part and getattr(self, SEEN.get(medium.kind, ""), False))


WATSONX = UpstreamCapabilities(
    sampling=False,
    parallel_tool_calls=False,
    completions=False,
    stream_usage=False,
    extra_content=False,
)

SEEN: Mapping[MediaKind, str] = MappingProxyType(
    {"image": "images", "audio": "audio", "video": "video"}
)
"""The capability that each kind of media needs; there is none for files."""

OPENAI = UpstreamCapabilities(
    sampling=False, developer_role=True, max_tokens_field="max_completion_tokens"
)
"""OpenAI's own API, also on Azure."""


def capabilities_of(source: str) -> UpstreamCapabilities:
    """The capabilities of the server that a `source` names, as far as its kind and host tell."""
    kind, url = kind_and_url(source)
    if kind == "watsonx":
        return WATSONX
    host = urlsplit(url).hostname or ""
    is_openai = host == "api.openai.com" or host.endswith(".openai.azure.com")
    return OPENAI if is_openai else UpstreamCapabilities()


@dataclass(frozen=True, slots=True)
class UpstreamPolicy:
    """Limits of the time that an upstream may take, and of repeated requests."""

    first_seconds: Annotated[float, Gt(0), Le(86400)] = float(limits.UPSTREAM_FIRST_SECONDS)
    """The most seconds until the answer begins."""
    retries: Annotated[int, Ge(0), Le(10)] = limits.UPSTREAM_RETRIES
    """How often a request is sent again if it failed before its answer began."""

    @property
    def idle_seconds(self) -> float:
        """The most seconds in which an answer that has begun may not grow."""
        return min(self.first_seconds, limits.UPSTREAM_IDLE_SECONDS)


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    kind: Kind
    url: str
    """The base URL, to which `/chat/completions` is added."""
    model: str
    """The model's name on that server."""
    api_key_env: str | None = None
    """The environment variable with the key; None: the upstream needs none."""
    project_id: str | None = None
    """The project on watsonx; it takes precedence over the space."""
    space_id: str | None = None
    capabilities: UpstreamCapabilities = field(default_factory=UpstreamCapabilities)
    policy: UpstreamPolicy = field(default_factory=UpstreamPolicy)
    fallback: tuple[str, ...] = ()
    """Models that get the request, one after the other, if this one can't answer."""

    @property
    def host(self) -> str:
        """The host and port, which messages and logs show in place of the URL with its secrets."""
        parts = urlsplit(self.url)
        return parts.hostname or "" if parts.port is None else f"{parts.hostname}:{parts.port}"
