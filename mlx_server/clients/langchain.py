"""`ChatMLX`: LangChain's chat model for this server, and for any server of OpenAI's API."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

try:
    import langchain_core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "ChatMLX needs LangChain. Install it with `pip install 'mlx-local-server[langchain]'`."
    ) from error

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.content import ContentBlock, ReasoningContentBlock, TextContentBlock
from langchain_core.messages.content import ToolCallChunk as BlockOfCallChunk
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import OutputParserLike
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
    make_invalid_tool_call,
    parse_tool_call,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from mlx_server.clients.endpoint import LOCAL_URL, Endpoint
from mlx_server.clients.exchange import Exchange, Wire, arun, cut_off, run, sent
from mlx_server.errors import GenerationFailed
from mlx_server.upstream.pieces import reasoning_of, usage_of

if TYPE_CHECKING:
    from mlx_server.clients.gateway import Gateway

THINKING, REASONING = "thinking", "reasoning_content"
"""Keys of `additional_kwargs` that hold thoughts: this package's own, and the one from which
LangChain makes content blocks of the type `reasoning`."""

PROVIDER = "mlx-server"

REPORTED = ("id", "created", "system_fingerprint", "service_tier", "mlx_server")
"""Members of a response body that are copied to `response_metadata`."""


def to_wire(message: BaseMessage, *, sends_thoughts: bool) -> Wire:
    """sends_thoughts: whether earlier thoughts are sent; gpt-oss needs them between a call and its
    result."""
    if not isinstance(message, AIMessage):
        return convert_to_openai_messages(message)
    # convert_to_openai_messages would send an answer's reasoning blocks as content too
    bare = AIMessage(
        str(message.text),
        name=message.name,
        tool_calls=message.tool_calls,
        invalid_tool_calls=message.invalid_tool_calls,
    )
    wire: Wire = convert_to_openai_messages(bare)
    if sends_thoughts and (thoughts := thoughts_of(message)):
        wire[REASONING] = thoughts
    return wire


def thoughts_of(message: AIMessage) -> str:
    """The message's thoughts, which are in `additional_kwargs` or in its content blocks."""
    thoughts = message.additional_kwargs.get(THINKING) or message.additional_kwargs.get(REASONING)
    if isinstance(thoughts, str):
        return thoughts
    blocks = message.content_blocks
    return "".join(block.get("reasoning", "") for block in blocks if block["type"] == "reasoning")


def to_message(body: Mapping[str, Any], choice: Mapping[str, Any]) -> AIMessage:
    wire: Mapping[str, Any] = choice.get("message") or {}
    calls: list[ToolCall] = []
    broken: list[InvalidToolCall] = []
    for raw in wire.get("tool_calls") or ():
        try:
            if call := parse_tool_call(raw, return_id=True):
                calls.append(ToolCall(name=call["name"], args=call["args"], id=call["id"]))
        except ValueError as error:
            broken.append(make_invalid_tool_call(raw, str(error)))
    return AIMessage(
        wire.get("content") or "",
        additional_kwargs=_thinking(wire),
        tool_calls=calls,
        invalid_tool_calls=broken,
        usage_metadata=_usage(body),
        response_metadata=_metadata(body, choice),
        id=body.get("id"),
    )


def to_chunk(body: Mapping[str, Any]) -> AIMessageChunk | None:
    """None for a chunk without choices or usage, for example one with the prompt's progress."""
    choice = next(iter(body.get("choices") or ()), None)
    usage = _usage(body)
    if choice is None:
        last = AIMessageChunk(content="", usage_metadata=usage, id=body.get("id"))
        return last if usage else None
    delta: Mapping[str, Any] = choice.get("delta") or {}
    is_last = bool(choice.get("finish_reason"))
    return AIMessageChunk(
        content=delta.get("content") or "",
        additional_kwargs=_thinking(delta),
        tool_call_chunks=list(_call_chunks(delta)),
        usage_metadata=usage,
        response_metadata=_metadata(body, choice) if is_last else {"model_provider": PROVIDER},
        id=body.get("id"),
    )


def _blocks(message: AIMessage) -> list[ContentBlock]:
    """Makes LangChain fall back to its own blocks, which are right for a complete message."""
    raise NotImplementedError


def _chunk_blocks(message: AIMessageChunk) -> list[ContentBlock]:
    """Content blocks with a separate `index` for thoughts, text and each call. Without it LangChain
    would merge blocks of different kinds when it adds up chunks."""
    if message.chunk_position == "last" and message.tool_calls:  # the chunks are added up already
        raise NotImplementedError
    blocks: list[ContentBlock] = []
    if thoughts := message.additional_kwargs.get(THINKING):
        blocks.append(ReasoningContentBlock(type="reasoning", reasoning=thoughts, index="lc_rs_0"))
    if message.text:
        blocks.append(TextContentBlock(type="text", text=str(message.text), index="lc_txt_0"))
    for chunk in message.tool_call_chunks:
        call = BlockOfCallChunk(
            type="tool_call_chunk", id=chunk["id"], name=chunk["name"], args=chunk["args"]
        )
        blocks.append({**call, "index": f"lc_tc_{chunk['index']}"})
    return blocks


register_translator(PROVIDER, _blocks, _chunk_blocks)


def _call_chunks(delta: Mapping[str, Any]) -> Iterator[ToolCallChunk]:
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        yield tool_call_chunk(
            name=function.get("name"),
            args=function.get("arguments"),
            id=call.get("id"),
            index=call.get("index"),
        )


def _thinking(wire: Mapping[str, Any]) -> Wire:
    thoughts = reasoning_of(wire)
    return {THINKING: thoughts, REASONING: thoughts} if thoughts else {}


def _metadata(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Wire:
    metadata: Wire = {"model_provider": PROVIDER, "model_name": body.get("model")}
    metadata |= {name: body[name] for name in REPORTED if body.get(name) is not None}
    metadata["finish_reason"] = choice.get("finish_reason")
    if choice.get("logprobs"):
        metadata["logprobs"] = choice["logprobs"]
    return metadata


def _usage(body: Mapping[str, Any]) -> UsageMetadata | None:
    if not (usage := usage_of(body)):
        return None
    prompt, answer = usage.prompt or 0, usage.completion or 0
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=answer,
        total_tokens=prompt + answer,
        input_token_details=InputTokenDetails(cache_read=usage.cached),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning or 0),
    )


Method = Literal["json_schema", "function_calling", "json_mode"]

Schema = dict[str, Any] | type


def bound(schema: Schema | None, method: Method, strict: bool | None) -> dict[str, Any]:
    """The request fields that make the answer follow the schema by this method."""
    if method == "json_mode":
        wanted: dict[str, Any] = {"response_format": {"type": "json_object"}}
    elif schema is None:
        raise ValueError(f"The method {method} needs a schema.")
    elif method == "json_schema":
        wanted = {"response_format": _response_format(schema, strict)}
    else:
        tool = convert_to_openai_tool(schema, strict=strict)
        named = {"type": "function", "function": {"name": tool["function"]["name"]}}
        wanted = {"tools": [tool], "tool_choice": named, "parallel_tool_calls": False}
    shown = convert_to_json_schema(schema) if schema is not None else None
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": shown}
    return {**wanted, "ls_structured_output_format": traced}


def parser_of(schema: Schema | None, method: Method) -> OutputParserLike[Any]:
    # a Pydantic model gives objects of itself, any other schema gives dictionaries
    model: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    if method == "function_calling" and schema is not None:
        if model:
            return PydanticToolsParser(tools=[model], first_tool_only=True)
        name = convert_to_openai_tool(schema)["function"]["name"]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return PydanticOutputParser(pydantic_object=model) if model else JsonOutputParser()


def parsed_by(
    llm: Runnable[LanguageModelInput, Any], parser: OutputParserLike[Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`llm` followed by `parser`.

    include_raw: whether the output is a dictionary of the message, the parsed value and the error.
    """
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(schema: Schema, strict: bool | None) -> dict[str, Any]:
    if isinstance(schema, dict) and "schema" in schema and "name" in schema:
        return {"type": "json_schema", "json_schema": dict(schema)}
    function = convert_to_openai_tool(schema, strict=strict)["function"]
    wanted = {"name": function["name"], "schema": function["parameters"]}
    about = {"description": function["description"]} if function.get("description") else {}
    return {
        "type": "json_schema",
        "json_schema": {**wanted, **about, "strict": strict is not False},
    }


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
    """The family by which answers of another server are parsed, repaired and checked, for example
    `gpt_oss` if Harmony's tokens are left in the text. With None answers are taken as they come,
    which is right for this server."""
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
        traced = super()._get_ls_params(stop=stop, **kwargs)
        traced["ls_provider"] = "mlx-server"
        traced["ls_model_name"] = kwargs.get("model", self.model_name)
        return traced

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
        body, reading = self._streamed(self._body(messages, stop, kwargs))
        for chunk in self._http_endpoint.stream(body):
            for generation in reading.feed(chunk):
                if run_manager:
                    run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation
        reading.end()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        body, reading = self._streamed(self._body(messages, stop, kwargs))
        async for chunk in self._http_endpoint.astream(body):
            for generation in reading.feed(chunk):
                if run_manager:
                    await run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation
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
            "messages": [to_wire(each, sends_thoughts=self.sends_thoughts) for each in messages],
            **self._sampling(),
            **self.extra_body,
            **given,
        }
        if stop is not None:
            body["stop"] = stop
        if "tool_choice" in body:
            body["tool_choice"] = _choice(body["tool_choice"], body.get("tools") or [])
        return body

    def _streamed(self, body: Wire) -> tuple[Wire, "MessageReader"]:
        """The body of a request for a stream, and the reader of the stream."""
        reader = MessageReader(self._gateway.stream(body).feed if self._gateway else None)
        body = self._gateway.described(body) if self._gateway else body
        usage = {"stream_options": {"include_usage": True}} if self.stream_usage else {}
        return {**body, **usage}, reader

    def _exchange(self, body: Wire) -> Exchange:
        return self._gateway.ask(body) if self._gateway else sent(body)

    @cached_property
    def _gateway(self) -> "Gateway | None":
        """What parses and checks the answers of another server, if there is a `family`."""
        from mlx_server.clients.gateway import Gateway  # the parsers of all families

        return Gateway(self.family) if self.family else None

    def _result(self, answer: Wire) -> ChatResult:
        choices = answer.get("choices")
        if not choices:
            raise GenerationFailed("The answer has no `choices`, so that there is no message.")
        messages = [to_message(answer, choice) for choice in choices]
        return ChatResult(generations=[ChatGeneration(message=message) for message in messages])


class MessageReader:
    """Turns the chunks of a chat completion into those of one LangChain message."""

    def __init__(self, read: Callable[[Wire], Sequence[Wire]] | None) -> None:
        """read: parses and checks the chunks of another server."""
        self._read = read or (lambda chunk: [chunk])
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
