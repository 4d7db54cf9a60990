"""LangChain's chat model, over chat completions."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from mlx_server.clients.endpoint import LOCAL_URL, Endpoint
from mlx_server.clients.exchange import Exchange, Wire, arun, cut_off, run
from mlx_server.clients.langchain.messages import to_chunk, to_message, to_wire
from mlx_server.clients.langchain.structured import Method, Schema, bound, parsed_by, parser_of
from mlx_server.errors import GenerationFailed

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
    *("reasoning_effort", "thinking_budget", "max_response_tokens"),
)
"""Fields of `ChatMLX` that are sent with each request, unless they are None."""


class ChatMLX(BaseChatModel):
    """A chat model of a server of OpenAI's API; by default `mlx-server` on this machine.

    Thoughts are in `additional_kwargs["thinking"]` and, as blocks of the type `reasoning`, in
    `content_blocks`. Repairs are in `response_metadata["mlx_server"]`.
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    model_name: str = Field(alias="model")
    base_url: str = LOCAL_URL
    api_key: SecretStr | None = None
    timeout: float = 600.0
    max_retries: int = 2
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    """The maximum number of tokens of the thoughts."""
    max_response_tokens: int | None = None
    """The maximum number of tokens of the answer after its thoughts."""
    sends_thoughts: bool = True
    """Whether earlier thoughts are sent with the conversation. gpt-oss needs them between a call
    and its result."""
    streaming: bool = False
    """Whether `invoke` streams too, for callbacks such as `on_llm_new_token`."""
    stream_usage: bool = True
    """Whether a stream's last chunk has the usage."""
    family: str | None = None
    """The family by which answers of another server are parsed again, for example `gpt_oss` if
    Harmony's tokens are left in the text. With None answers are taken as they come, which is right
    for this server."""
    extra_body: Wire = Field(default_factory=dict)
    """Further fields of each request, for example `adapter`."""
    _endpoint: Endpoint | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "mlx-server"

    @property
    def _identifying_params(self) -> Wire:
        return {"model_name": self.model_name, "base_url": self.base_url, **self._sampling()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        found = super()._get_ls_params(stop=stop, **kwargs)
        found["ls_provider"] = "mlx-server"
        found["ls_model_name"] = kwargs.get("model", self.model_name)
        return found

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """tool_choice: a tool's name, "auto", "none", "any" or "required"; True means "required".
        strict: whether arguments must follow the tool's schema exactly."""
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        fields: Wire = {"tools": described, **kwargs}
        if (chosen := _choice(tool_choice, described)) is not None:
            fields["tool_choice"] = chosen
        if parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = parallel_tool_calls
        return super().bind(**fields)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A runnable whose output is an object of `schema`, a Pydantic model or a JSON Schema.

        `json_schema` requests an answer of the schema, `function_calling` a tool call with it, and
        `json_mode` any JSON, whose form the prompt has to describe.
        """
        llm = self.bind(**bound(schema, method, strict), **kwargs)
        return parsed_by(llm, parser_of(schema, method), include_raw=include_raw)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = self._body(messages, stop, kwargs)
        return self._result(run(self._exchange(body), self._http_endpoint.send))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = self._body(messages, stop, kwargs)
        return self._result(await arun(self._exchange(body), self._http_endpoint.asend))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        body = self._streaming(self._body(messages, stop, kwargs))
        reading = MessageReader(self.family, body)
        for chunk in self._http_endpoint.stream(body):
            for found in reading.feed(chunk):
                if run_manager:
                    run_manager.on_llm_new_token(found.text, chunk=found)
                yield found
        reading.end()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        body = self._streaming(self._body(messages, stop, kwargs))
        reading = MessageReader(self.family, body)
        async for chunk in self._http_endpoint.astream(body):
            for found in reading.feed(chunk):
                if run_manager:
                    await run_manager.on_llm_new_token(found.text, chunk=found)
                yield found
        reading.end()

    @property
    def _http_endpoint(self) -> Endpoint:
        if self._endpoint is None:
            key = self.api_key.get_secret_value() if self.api_key else None
            self._endpoint = Endpoint(self.base_url, key, self.timeout, self.max_retries)
        return self._endpoint

    def _sampling(self) -> Wire:
        values = ((name, getattr(self, name)) for name in SAMPLING)
        return {name: value for name, value in values if value is not None}

    def _body(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> Wire:
        body: Wire = {
            "model": self.model_name,
            "messages": to_wire(messages, sends_thoughts=self.sends_thoughts),
            **self._sampling(),
            **self.extra_body,
            **given,
        }
        if stop is not None:
            body["stop"] = stop
        if "tool_choice" in body:
            body["tool_choice"] = _choice(body["tool_choice"], body.get("tools") or [])
        return body

    def _streaming(self, body: Wire) -> Wire:
        return {**body, "stream_options": {"include_usage": True}} if self.stream_usage else body

    def _exchange(self, body: Wire) -> Exchange:
        """Sends the body, and parses the answer again if there is a `family`."""
        answer = yield body
        if self.family:
            from mlx_server.clients.foreign_answers import read_completion, reading_options

            answer = read_completion(answer, reading_options(body, self.family))
        return answer

    def _result(self, answer: Wire) -> ChatResult:
        choices = answer.get("choices")
        if not choices:
            raise GenerationFailed("The answer has no `choices`, so that there is no message.")
        messages = [to_message(answer, choice) for choice in choices]
        return ChatResult(generations=[ChatGeneration(message=message) for message in messages])


class MessageReader:
    """Turns the chunks of a chat completion into those of one LangChain message."""

    def __init__(self, family: str | None, body: Mapping[str, Any]) -> None:
        self._read: Callable[[Wire], Sequence[Wire]] = lambda chunk: [chunk]
        if family:
            from mlx_server.clients.foreign_answers import ForeignStreamReader, reading_options

            self._read = ForeignStreamReader(reading_options(body, family)).feed
        self._is_complete = False

    def feed(self, chunk: Wire) -> Iterator[ChatGenerationChunk]:
        for each in self._read(chunk):
            message = to_chunk(each)
            if message is None:
                continue
            if message.response_metadata.get("finish_reason"):
                self._is_complete = True
            yield ChatGenerationChunk(message=message)

    def end(self) -> None:
        """Raises GenerationFailed if the stream ended before the message did."""
        if not self._is_complete:
            raise cut_off()


def _choice(
    choice: str | bool | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]
) -> str | Mapping[str, Any] | None:
    """LangChain's `tool_choice` as OpenAI's API has it."""
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if not isinstance(choice, str) or choice in ("auto", "none", "required"):
        return choice
    if choice == "any":
        return "required"
    names = [tool["function"]["name"] for tool in tools]
    if choice not in names:
        raise ValueError(f"tool_choice is {choice!r}, and the tools are {', '.join(names)}.")
    return {"type": "function", "function": {"name": choice}}
