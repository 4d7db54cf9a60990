"""The settings of a model that another server has, from models.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from mlx_server import limits

Kind = Literal["openai", "watsonx"]

ReasoningField = Literal["reasoning_content", "reasoning"]

PREFIXES: Mapping[str, Kind] = MappingProxyType({"openai+": "openai", "watsonx:": "watsonx"})
"""The prefixes of a `source` that is a URL of another server, and the API of that server."""


def is_upstream(source: str) -> bool:
    return any(source.startswith(prefix) for prefix in PREFIXES)


def kind_and_url(source: str) -> tuple[Kind, str]:
    for prefix, kind in PREFIXES.items():
        if source.startswith(prefix):
            return kind, source.removeprefix(prefix).rstrip("/")
    raise AssertionError(f"{source!r} is not an upstream")


@dataclass(frozen=True, slots=True)
class UpstreamCapabilities:
    """The features that an upstream has. A missing one is made up for here, ignored or refused by
    name."""

    tools: bool = True
    """Whether tools are passed on; if not, the prompt describes them, and calls are read in Hermes'
    format."""
    tool_choice: bool = True
    """Whether `tool_choice` is passed on. It is checked in any case."""
    parallel_tool_calls: bool = True
    """Whether `parallel_tool_calls` is passed on. It is enforced in any case."""
    tool_messages: bool = True
    """Whether earlier calls and their results are sent as such; if not, they are sent as text."""
    reasoning_messages: bool | Literal["tool_rounds"] = False
    """Whether the reasoning of earlier messages is sent back. `tool_rounds`: of those after the
    user's last message, as DeepSeek, Kimi and MiniMax demand. It is learnt from an answer that has
    reasoning in a field of its own."""
    reasoning_field: ReasoningField = "reasoning_content"
    """The field in which earlier reasoning is sent back."""
    extra_content: bool = True
    """Whether the fields of its own that it sent with a call are sent back with that call: Gemini's
    signatures, OpenRouter's `reasoning_details`."""
    json_schema: bool = True
    """Whether a schema is passed on; if not, it is described in the prompt. An answer is checked
    in any case."""
    structured_outputs: bool = False
    """Whether a regex, a choice or a grammar is passed on, as vLLM names them."""
    reasoning_effort: bool = True
    chat_template_kwargs: bool = False
    continue_message: bool = False
    """Whether an answer may continue the last message, as vLLM names it."""
    thinking_budget: bool = False
    """Whether `thinking_budget` is passed on, as this server names it. If not, and if a message can
    be continued, thoughts are limited by a second request."""
    sampling: bool = True
    """Whether `top_k`, `min_p` and `repetition_penalty` are passed on, which OpenAI's API lacks."""
    penalties: bool = True
    """Whether `presence_penalty` and `frequency_penalty` are passed on."""
    seed: bool = True
    stop: bool = True
    """Whether stop strings are passed on. They end an answer in any case."""
    logit_bias: bool = True
    """Whether a bias is passed on. Its token ids are those of the upstream's vocabulary."""
    logprobs: bool = True
    """Whether log probabilities are asked for and passed on. They are those of its tokens."""
    completions: bool = True
    """Whether there is `/completions`, for prompts that are text."""
    stream_usage: bool = True
    """Whether `stream_options` may ask for the usage."""
    developer_role: bool = False
    """Whether `developer` is a role of messages; if not, such messages are sent as `system`."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


WATSONX = UpstreamCapabilities(
    sampling=False,
    parallel_tool_calls=False,
    completions=False,
    stream_usage=False,
    extra_content=False,
)

DEFAULTS: Mapping[Kind, UpstreamCapabilities] = MappingProxyType(
    {"openai": UpstreamCapabilities(), "watsonx": WATSONX}
)


@dataclass(frozen=True, slots=True)
class UpstreamPolicy:
    """Limits on the time that an upstream may take, and on repeated requests."""

    connect_seconds: float = float(limits.UPSTREAM_CONNECT_SECONDS.value)
    first_seconds: float = float(limits.UPSTREAM_FIRST_SECONDS.value)
    """The seconds until the answer begins."""
    idle_seconds: float = float(limits.UPSTREAM_IDLE_SECONDS.value)
    """The seconds between two events of a stream."""
    retries: int = limits.UPSTREAM_RETRIES.value
    """The number of times that a request is sent again if it was refused or lost before its answer
    began."""
    empty_retries: int = 1
    """The number of times that an answer without text or calls is requested again."""


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    kind: Kind
    url: str
    """The base URL, to which `/chat/completions` is added."""
    model: str
    """The model's name on that server."""
    api_key_env: str | None = None
    """The environment variable that has the key."""
    project_id: str | None = None
    """watsonx's project, or else its space."""
    space_id: str | None = None
    iam_url: str = "https://iam.cloud.ibm.com"
    """The server that issues watsonx's tokens."""
    capabilities: UpstreamCapabilities = field(default_factory=UpstreamCapabilities)
    stated: frozenset[str] = frozenset()
    """The capabilities that the owner has set. What the upstream says does not change them."""
    policy: UpstreamPolicy = field(default_factory=UpstreamPolicy)
    fallback: tuple[str, ...] = ()
    """Models that are asked instead if this one can't answer."""

    @property
    def host(self) -> str:
        """The server's name for messages and logs, without credentials or a path."""
        parts = urlsplit(self.url)
        return parts.hostname or "" if parts.port is None else f"{parts.hostname}:{parts.port}"
