"""One interface to models of any server: `LLMProvider.invoke` returns `{response, thinking}`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec
import yaml

from mlx_server.clients.endpoint import LOCAL_URL, Endpoint
from mlx_server.clients.exchange import Exchange, Wire, arun, run, sent
from mlx_server.clients.gateway import Gateway
from mlx_server.errors import GenerationFailed, SettingsError
from mlx_server.events import ReasoningDelta, TextDelta
from mlx_server.reading import read
from mlx_server.requests import ALL_REPAIRS
from mlx_server.upstream.pieces import read_piece

if TYPE_CHECKING:
    from mlx_server.clients.provided_chat import ProvidedChat

Backend = Literal["mlx_server", "vllm", "llama_cpp", "openrouter", "openai"]
ThinkTag = Literal["think", "thinking"]

URLS: Mapping[Backend, str] = MappingProxyType(
    {
        "mlx_server": LOCAL_URL,
        "vllm": "http://127.0.0.1:8001/v1",
        "llama_cpp": "http://127.0.0.1:8080/v1",
        "openrouter": "https://openrouter.ai/api/v1",
        "openai": "https://api.openai.com/v1",
    }
)

SAMPLING = ("temperature", "top_p", "seed", "max_tokens", "stop", "reasoning_effort")

CONTINUING: tuple[Backend, ...] = ("vllm", "llama_cpp")
"""Backends that can continue a message, so that two requests can limit the thoughts."""


class GenerationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    reasoning_effort: str | None = None
    two_pass: bool = False
    """Whether thoughts and answer have separate limits, `max_thinking_tokens` and
    `max_response_tokens`."""
    think_tag: ThinkTag = "think"
    max_thinking_tokens: int | None = None
    max_response_tokens: int | None = None


class ProviderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    model_name: str
    provider: Backend = "mlx_server"
    base_url: str | None = None
    api_key_env: str | None = None
    """The name of the environment variable with the key; a server on this machine needs none."""
    parsing_format: Literal["think_tags", "direct_response"] = "direct_response"
    """Whether the messages of `LLMProvider.client` begin with the thoughts in tags, or have the
    text alone."""
    tool_parser: Literal["openai", "hermes"] = "openai"
    """With `hermes` the prompt describes the tools, for servers without tool calling."""
    family: str = "plain"
    """The family by which answers of backends other than mlx_server are parsed."""
    retries: int = 1
    """How often an answer of another backend is requested again if it is empty or breaks its
    schema."""
    timeout: float = 600.0
    """In seconds."""
    generation_config: GenerationConfig = msgspec.field(default_factory=GenerationConfig)

    @property
    def url(self) -> str:
        return self.base_url or URLS[self.provider]


class ProviderAnswer(TypedDict):
    response: str
    thinking: str


class ProviderToolAnswer(ProviderAnswer):
    tool_calls: list[Wire]
    """Each call has an `id`, a `name` and `arguments` as JSON text."""


def load_providers(path: str | Path) -> dict[str, ProviderConfig]:
    """The providers, by name, of a YAML file with the list `providers`. Raises SettingsError."""
    path = Path(path)
    try:
        listed = yaml.safe_load(path.read_text("utf-8"))
        providers = msgspec.convert(listed["providers"], list[ProviderConfig])
    except (OSError, yaml.YAMLError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise SettingsError(f"{path.name} has no valid list of `providers`: {error}") from None
    names = [each.name for each in providers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"{path.name} has several providers of the name {', '.join(twice)}.")
    return {each.name: each for each in providers}


class LLMProvider:
    """A model of any backend, with the same methods for all."""

    def __init__(self, config: ProviderConfig) -> None:
        self.config = config
        _limits(config)  # raises now, not at the first request, for limits the backend can't set

    @cached_property
    def client(self) -> "ProvidedChat":
        """LangChain's chat model of this provider."""
        from mlx_server.clients.provided_chat import ProvidedChat

        return ProvidedChat.of(self.config)

    def invoke(self, messages: str | Sequence[Wire], **fields: Any) -> ProviderAnswer:
        """Sends messages, or one user text. `fields` are added to the request."""
        return _answer_parts(run(self._exchange(messages, fields), self._endpoint.send))

    async def ainvoke(self, messages: str | Sequence[Wire], **fields: Any) -> ProviderAnswer:
        return _answer_parts(await arun(self._exchange(messages, fields), self._endpoint.asend))

    def invoke_tools(
        self, messages: str | Sequence[Wire], tools: Sequence[Wire], **fields: Any
    ) -> ProviderToolAnswer:
        """Like `invoke`, with tools in the format of OpenAI's API."""
        exchange = self._exchange(messages, {"tools": list(tools), **fields})
        answer = run(exchange, self._endpoint.send)
        calls = answer["choices"][0]["message"].get("tool_calls") or ()
        tool_calls = [{"id": call["id"], **call["function"]} for call in calls]
        return {**_answer_parts(answer), "tool_calls": tool_calls}

    def parse_response(self, content: str) -> ProviderAnswer:
        """Splits the content of a message of `client` into its text and its thoughts."""
        if self.config.parsing_format == "direct_response":
            return {"response": content, "thinking": ""}
        events = read(content, "plain")
        texts = "".join(each.separated for each in events if isinstance(each, TextDelta))
        thoughts = (each.separated for each in events if isinstance(each, ReasoningDelta))
        return {"response": texts, "thinking": "".join(thoughts)}

    @cached_property
    def _endpoint(self) -> Endpoint:
        return endpoint_of(self.config)

    def _exchange(self, messages: str | Sequence[Wire], fields: Mapping[str, Any]) -> Exchange:
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return provider_exchange(self.config, {"messages": list(asked), **fields})


def endpoint_of(config: ProviderConfig) -> Endpoint:
    key = None
    if config.api_key_env:
        key = os.environ.get(config.api_key_env)
        if not key:
            raise SettingsError(
                f"The provider {config.name} takes its key from {config.api_key_env}, which is not "
                "set in the environment."
            )
    return Endpoint(config.url, key, config.timeout)


def provider_exchange(config: ProviderConfig, body: Wire) -> Exchange:
    """The exchange that answers `body`, which has no model and sampling parameters yet."""
    body = {"model": config.model_name, **_limits(config), **body}
    if config.provider == "mlx_server":  # it parses, checks and repairs answers by itself
        return sent(body)
    generation = config.generation_config
    gateway = Gateway(
        config.family,
        replace(ALL_REPAIRS, retries=config.retries),
        tools_in_prompt=config.tool_parser == "hermes",
        think_tag=generation.think_tag,
        thinking_tokens=generation.max_thinking_tokens if config.provider in CONTINUING else None,
    )
    return gateway.ask(body)


def _limits(config: ProviderConfig) -> Wire:
    """The generation settings as request fields of this backend. Raises SettingsError for limits
    that it can't set."""
    settings = msgspec.structs.asdict(config.generation_config)
    sampling = {name: settings[name] for name in SAMPLING if settings[name] is not None}
    thinking, response = settings["max_thinking_tokens"], settings["max_response_tokens"]
    if not settings["two_pass"]:
        if thinking or response:
            raise _unsupported(config, "two_pass is false: set it, or leave these limits out.")
        return sampling
    if thinking is None:
        raise _unsupported(config, "two_pass needs max_thinking_tokens.")
    both = {"max_tokens": thinking + response} if response else {}
    match config.provider:
        case "mlx_server":
            answer = {"max_response_tokens": response} if response else {}
            return {**sampling, "thinking_budget": thinking, **answer}
        case "openrouter":
            return {**sampling, "reasoning": {"max_tokens": thinking}, **both}
        case "openai":
            raise _unsupported(config, "OpenAI's API has no limit of thoughts.")
    return {**sampling, **both}


def _unsupported(config: ProviderConfig, why: str) -> SettingsError:
    return SettingsError(
        f"The provider {config.name} can't have max_thinking_tokens or max_response_tokens: {why}"
    )


def _answer_parts(answer: Wire) -> ProviderAnswer:
    if not answer.get("choices"):
        raise GenerationFailed("The answer has no `choices`, so that there is no message.")
    said = read_piece(answer)
    return {"response": said.text, "thinking": said.reasoning}
