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

Seconds = Annotated[float, Gt(0), Le(86400)]

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
"""Marks fields that the kind of a server or its list of models tells, and that are no settings."""


@dataclass(frozen=True, slots=True)
class UpstreamCapabilities:
    """The features of an upstream. A missing one is emulated here, listed as ignored or refused by
    name."""

    tools: bool = True
    """Whether tools are sent. If not, the prompt describes them, and calls are parsed in Hermes'
    format."""
    tool_choice: bool = True
    """Whether `tool_choice` is sent. Answers are checked for it in any case."""
    parallel_tool_calls: bool = field(default=True, metadata=DERIVED)
    """Whether `parallel_tool_calls` is sent. It is enforced in any case."""
    tool_messages: bool = True
    """Whether earlier calls and their results are sent in their own fields; if not, as text."""
    reasoning_messages: bool | Literal["tool_rounds"] = False
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
    structured_outputs: bool = False
    """Whether a regex, a choice or a grammar is sent, by vLLM's names of these fields."""
    reasoning_effort: bool = field(default=True, metadata=DERIVED)
    chat_template_kwargs: bool = False
    continue_message: bool = False
    """Whether an answer can continue the last message, by vLLM's `continue_final_message`."""
    thinking_budget: bool = field(default=False, metadata=DERIVED)
    """Whether `thinking_budget` is sent, by this server's name of the field. If not, two requests
    limit the thoughts, if a message can be continued."""
    sampling: bool = True
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
    developer_role: bool = False
    """Whether messages may have the role `developer`; if not, they are sent as `system`."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
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

DEFAULTS: Mapping[Kind, UpstreamCapabilities] = MappingProxyType(
    {"openai": UpstreamCapabilities(), "watsonx": WATSONX}
)


@dataclass(frozen=True, slots=True)
class UpstreamPolicy:
    """Limits of the time that an upstream may take, and of repeated requests."""

    connect_seconds: Seconds = float(limits.UPSTREAM_CONNECT_SECONDS)
    first_seconds: Seconds = float(limits.UPSTREAM_FIRST_SECONDS)
    """The most seconds until the answer begins."""
    idle_seconds: Seconds = float(limits.UPSTREAM_IDLE_SECONDS)
    """The most seconds in which an answer that has begun may not grow."""
    answer_seconds: Seconds = float(limits.UPSTREAM_ANSWER_SECONDS)
    """The most seconds from the request to the answer's end, retries included."""
    retries: Annotated[int, Ge(0), Le(10)] = limits.UPSTREAM_RETRIES
    """How often a request is sent again if it failed before its answer began."""
    empty_retries: Annotated[int, Ge(0), Le(4)] = 1
    """How often an answer without text or calls is requested again."""


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
    iam_url: str = "https://iam.cloud.ibm.com"
    """The server that issues tokens for watsonx."""
    capabilities: UpstreamCapabilities = field(default_factory=UpstreamCapabilities)
    policy: UpstreamPolicy = field(default_factory=UpstreamPolicy)
    fallback: tuple[str, ...] = ()
    """Models that get the request, one after the other, if this one can't answer."""

    @property
    def host(self) -> str:
        """The host and port, which messages and logs show in place of the URL with its secrets."""
        parts = urlsplit(self.url)
        return parts.hostname or "" if parts.port is None else f"{parts.hostname}:{parts.port}"
