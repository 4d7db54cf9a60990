"""`ModelInference` as a replacement of `ibm_watsonx_ai.foundation_models.ModelInference`.

To migrate a program, or to go back, only its import has to change: all other names of
`ibm_watsonx_ai` and its `foundation_models` can be imported from here too, unchanged.
"""

import importlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, Literal, Self

from mlx_server.clients.endpoint import COMPLETIONS, Endpoint
from mlx_server.clients.exchange import Wire, arun, cut_off, run
from mlx_server.clients.gateway import Gateway, GatewayStream
from mlx_server.errors import BadRequest, SettingsError
from mlx_server.events import Event, TextDelta
from mlx_server.reading import OutputReader, read
from mlx_server.requests import ALL_REPAIRS, RepairPolicy
from mlx_server.upstream.dialects import REASONING, facts_in
from mlx_server.upstream.text_families import opening_of_reasoning

TEXT_PARAMS: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "stop_sequences": "stop",
        "random_seed": "seed",
    }
)
"""Maps IBM's parameters of text generation to those of OpenAI's API."""

SAME_PARAMS = ("temperature", "top_p", "top_k", "repetition_penalty")

UNFINISHED = "not_finished"
STOP_REASONS = MappingProxyType({None: UNFINISHED, "stop": "eos_token", "length": "max_tokens"})


@dataclass(frozen=True)
class EndpointInference:
    model_id: str
    endpoint: Endpoint
    params: Wire = field(default_factory=dict)
    special_tokens: bool = False
    """Whether a text needs its special tokens, for example to tell thoughts from the answer."""

    def chat(self, messages: Sequence[Wire], **given: Any) -> Wire:
        return self._with_model_id(self.endpoint.send(self._body(messages, given)))

    async def achat(self, messages: Sequence[Wire], **given: Any) -> Wire:
        return self._with_model_id(await self.endpoint.asend(self._body(messages, given)))

    def chat_stream(self, messages: Sequence[Wire], **given: Any) -> Iterator[Wire]:
        for chunk in self.endpoint.stream(self._body(messages, given)):
            yield self._with_model_id(chunk)

    async def achat_stream(self, messages: Sequence[Wire], **given: Any) -> AsyncIterator[Wire]:
        async for chunk in self.endpoint.astream(self._body(messages, given)):
            yield self._with_model_id(chunk)

    def generate_text(
        self, prompt: str | Sequence[str] | None, params: Wire | None = None, **given: Any
    ) -> Any:
        raw = given.pop("raw_response", False)
        _check_supported(given)
        if not isinstance(prompt, str):
            each = [self._generated(one, params) for one in prompt or ()]
            return each if raw else [_text_of(one) for one in each]
        response = self._generated(prompt, params)
        return response if raw else _text_of(response)

    def generate_text_stream(
        self, prompt: str | None, params: Wire | None = None, **given: Any
    ) -> Iterator[Any]:
        raw = given.pop("raw_response", False)
        _check_supported(given)
        for chunk in self.endpoint.stream(self._text_body(prompt or "", params), COMPLETIONS):
            results = self._results(chunk)
            if results["results"]:
                yield results if raw else _text_of(results)

    def _body(self, messages: Sequence[Wire], given: Mapping[str, Any]) -> Wire:
        rest = {name: value for name, value in given.items() if value is not None}
        params = rest.pop("params", self.params)
        option = rest.pop("tool_choice_option", None)
        tools = {name: rest.pop(name) for name in ("tools", "tool_choice") if name in rest}
        _check_supported(rest)
        if option and "tool_choice" not in tools:
            tools["tool_choice"] = option
        return {"model": self.model_id, "messages": list(messages), **params, **tools}

    def _with_model_id(self, answer: Wire) -> Wire:
        return {**answer, "model_id": self.model_id}

    def _generated(self, prompt: str, params: Wire | None) -> Wire:
        body = self._text_body(prompt, params)
        return self._results(self.endpoint.send(body, COMPLETIONS))

    def _text_body(self, prompt: str, params: Wire | None) -> Wire:
        given = dict(self.params if params is None else params)
        body: Wire = {"model": self.model_id, "prompt": prompt}
        if given.pop("decoding_method", None) == "greedy":
            body["temperature"] = 0
        for name, value in given.items():
            if name not in TEXT_PARAMS and name not in SAME_PARAMS:
                raise BadRequest(f"The parameter {name} has no equivalent at this endpoint.")
            body[TEXT_PARAMS.get(name, name)] = value
        if self.special_tokens and self._has_special_tokens:
            body["skip_special_tokens"] = False
        return body

    @cached_property
    def _has_special_tokens(self) -> bool:
        """Whether the server is known to send special tokens on request; others might refuse to."""
        known = facts_in(self.endpoint.models(), self.model_id).capabilities
        return known.get("special_tokens", False)

    def _results(self, answer: Wire) -> Wire:
        usage = answer.get("usage") or {}
        counts = {
            "generated_token_count": usage.get("completion_tokens") or 0,
            "input_token_count": usage.get("prompt_tokens") or 0,
        }
        results = [
            {
                "generated_text": choice.get("text") or "",
                **counts,
                "stop_reason": STOP_REASONS.get(reason := choice.get("finish_reason"), reason),
            }
            for choice in answer.get("choices") or ()
        ]
        return {"model_id": self.model_id, "results": results}


def _text_of(answer: Wire) -> str:
    return "".join(result["generated_text"] for result in answer["results"])


def _check_supported(given: Mapping[str, Any]) -> None:
    """Raises BadRequest for arguments that only watsonx honours, unless they have their default."""
    used = [name for name, value in given.items() if value not in (None, False)]
    used = [name for name in used if name not in ("concurrency_limit", "validate_prompt_variables")]
    if used:
        raise BadRequest(f"Only watsonx has {', '.join(used)}: this endpoint can't honour it.")


ENDPOINT = "openai+"
"""The prefix of a URL, in credentials as in models.yaml, of a server that is not watsonx."""

KEY, PROJECT, URL = "WATSONX_API_KEY", "WATSONX_PROJECT_ID", "WATSONX_REGION_URL"

ToolChoiceOption = Literal["none", "auto", "required"]

ToolParser = Literal["openai", "hermes"]


class ModelInference:
    """Takes the parameters of IBM's class and three more: `family`, by which answers are parsed;
    `tool_parser`, which is "hermes" to describe tools in the prompt of a model that ignores them
    otherwise; and `repair`, which says what may be repaired and how often an answer is retried.

    Attributes and methods that are not here are those of IBM's object, `original`.
    """

    def __init__(
        self,
        *,
        model_id: str | None = None,
        deployment_id: str | None = None,
        params: Any = None,
        credentials: Any = None,
        project_id: str | None = None,
        space_id: str | None = None,
        verify: Any = None,
        api_client: Any = None,
        validate: bool = True,
        max_retries: int | None = None,
        delay_time: float | None = None,
        retry_status_codes: list[int] | None = None,
        family: str = "gpt_oss",
        tool_parser: ToolParser = "openai",
        repair: RepairPolicy = ALL_REPAIRS,
        **kwargs: Any,
    ) -> None:
        self.family, self.tool_parser, self.repair = family, tool_parser, repair
        if credentials is None and api_client is None:
            credentials = _from_environment()
            if project_id is None and space_id is None:
                project_id = os.environ.get(PROJECT)
        if (endpoint := _endpoint(credentials, max_retries)) and model_id:
            self.original: Any = EndpointInference(
                model_id,
                endpoint,
                _params_dict(params) or {},
                special_tokens=bool(opening_of_reasoning(family)),
            )
            return
        self.original = _vendors_class()(
            model_id=model_id,
            deployment_id=deployment_id,
            params=params,
            credentials=credentials,
            project_id=project_id,
            space_id=space_id,
            verify=verify,
            api_client=api_client,
            validate=validate,
            max_retries=max_retries,
            delay_time=delay_time,
            retry_status_codes=retry_status_codes,
            **kwargs,
        )

    @classmethod
    def around(
        cls,
        original: Any,
        *,
        family: str = "gpt_oss",
        tool_parser: ToolParser = "openai",
        repair: RepairPolicy = ALL_REPAIRS,
    ) -> Self:
        """Wraps an existing object of IBM's class."""
        self = cls.__new__(cls)
        self.original, self.family = original, family
        self.tool_parser, self.repair = tool_parser, repair
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not set yet while unpickling, which would recurse
            raise AttributeError(name)
        return getattr(self.original, name)

    def chat(
        self,
        messages: list[Wire],
        params: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Wire | None = None,
        tool_choice_option: ToolChoiceOption | None = None,
        context: str | None = None,
        crypto: Any = None,
    ) -> Wire:
        body = self._body(messages, params, tools, tool_choice, tool_choice_option)
        more = _without_none(context=context, crypto=crypto)
        return run(
            self._gateway.ask(body), lambda each: self.original.chat(**_arguments(each), **more)
        )

    async def achat(
        self,
        messages: list[Wire],
        params: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Wire | None = None,
        tool_choice_option: ToolChoiceOption | None = None,
        context: str | None = None,
        crypto: Any = None,
    ) -> Wire:
        body = self._body(messages, params, tools, tool_choice, tool_choice_option)
        more = _without_none(context=context, crypto=crypto)
        return await arun(
            self._gateway.ask(body), lambda each: self.original.achat(**_arguments(each), **more)
        )

    def chat_stream(
        self,
        messages: list[Wire],
        params: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Wire | None = None,
        tool_choice_option: ToolChoiceOption | None = None,
        context: str | None = None,
    ) -> Iterator[Wire]:
        body = self._body(messages, params, tools, tool_choice, tool_choice_option)
        given, reader = self._streamed(body)
        for chunk in self.original.chat_stream(**given, **_without_none(context=context)):
            yield from reader.feed(chunk)
        reader.end()

    async def achat_stream(
        self,
        messages: list[Wire],
        params: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Wire | None = None,
        tool_choice_option: ToolChoiceOption | None = None,
        context: str | None = None,
    ) -> AsyncIterator[Wire]:
        body = self._body(messages, params, tools, tool_choice, tool_choice_option)
        given, reader = self._streamed(body)
        stream = self.original.achat_stream(**given, **_without_none(context=context))
        stream = await stream if hasattr(stream, "__await__") else stream
        async for received in stream:
            for chunk in reader.feed(received):
                yield chunk
        reader.end()

    def generate_text(
        self,
        prompt: str | list[Any] | None = None,
        params: Any = None,
        raw_response: bool = False,
        guardrails: bool = False,
        guardrails_hap_params: Wire | None = None,
        guardrails_pii_params: Wire | None = None,
        concurrency_limit: int = 8,
        validate_prompt_variables: bool = True,
        guardrails_granite_guardian_params: Wire | None = None,
        crypto: Any = None,
    ) -> Any:
        """The generated text without the reasoning and delimiters that the model wrote. With
        `raw_response` the whole response, whose text is cleaned in the same way."""
        response = self.original.generate_text(
            prompt=prompt,
            params=params,
            raw_response=raw_response,
            guardrails=guardrails,
            guardrails_hap_params=guardrails_hap_params,
            guardrails_pii_params=guardrails_pii_params,
            concurrency_limit=concurrency_limit,
            validate_prompt_variables=validate_prompt_variables,
            guardrails_granite_guardian_params=guardrails_granite_guardian_params,
            **_without_none(crypto=crypto),
        )
        if isinstance(response, list):
            prompts = chain(prompt if isinstance(prompt, list) else (), repeat(""))
            return [self._cleaned(each, one) for each, one in zip(response, prompts, strict=False)]
        return self._cleaned(response, prompt)

    def generate_text_stream(
        self,
        prompt: str | None = None,
        params: Any = None,
        raw_response: bool = False,
        guardrails: bool = False,
        guardrails_hap_params: Wire | None = None,
        guardrails_pii_params: Wire | None = None,
        validate_prompt_variables: bool = True,
        guardrails_granite_guardian_params: Wire | None = None,
    ) -> Iterator[Any]:
        """Streams the text without reasoning and delimiters. Raises GenerationFailed for a stream
        that ended before the text did."""
        reader = OutputReader(self.family, prompt_end=prompt or "", repair=self.repair)
        pieces: list[str] = []
        is_empty, last = True, dict[str, Any]()
        for piece in self.original.generate_text_stream(
            prompt=prompt,
            params=params,
            raw_response=True,  # the stop reason is only in the raw response
            guardrails=guardrails,
            guardrails_hap_params=guardrails_hap_params,
            guardrails_pii_params=guardrails_pii_params,
            validate_prompt_variables=validate_prompt_variables,
            guardrails_granite_guardian_params=guardrails_granite_guardian_params,
        ):
            last = piece
            pieces.append(_generated_text(piece))
            text = _joined(reader.feed(pieces[-1]))
            is_empty = is_empty and not text
            if text or raw_response:
                yield _with_text(piece, text) if raw_response else text
        rest = _joined(reader.finish())
        if is_empty and not rest:
            rest = self._text_of("".join(pieces))
        if rest:
            yield _with_text(last, rest) if raw_response else rest
        if not _has_ended(last):
            raise cut_off()

    def _body(
        self,
        messages: Sequence[Wire],
        params: Any,
        tools: Sequence[Any] | None,
        tool_choice: Wire | None,
        option: ToolChoiceOption | None,
    ) -> Wire:
        """The request in the form of OpenAI's API, from which `_arguments` makes IBM's."""
        own = _params_dict(getattr(self.original, "params", None))
        fields: Wire = dict(_params_dict(params) or own or {})
        if tools:
            fields["tools"] = list(tools)
            fields |= _without_none(tool_choice=tool_choice or option)
        return {**fields, "messages": [_message(each) for each in messages]}

    @property
    def _gateway(self) -> Gateway:
        in_prompt = self.tool_parser == "hermes"
        return Gateway(self.family, self.repair, tools_in_prompt=in_prompt)

    def _streamed(self, body: Wire) -> tuple[Wire, GatewayStream]:
        """The arguments of IBM's method for a stream, and the reader of the stream."""
        gateway = self._gateway
        return _arguments(gateway.described(body)), gateway.stream(body)

    def _cleaned(self, response: Any, prompt: Any) -> Any:
        text, prompt_end = _generated_text(response), prompt if isinstance(prompt, str) else ""
        return _with_text(response, self._text_of(text, prompt_end) or self._text_of(text))

    def _text_of(self, generated: str, prompt_end: str = "") -> str:
        """The text without reasoning and delimiters. It is empty after a prompt that opens
        reasoning if the server sends no delimiter that closes it."""
        return _joined(read(generated, self.family, prompt_end=prompt_end))


def _message(message: Wire) -> Wire:
    """The message with an empty text for a null content, which makes vLLM fail, and without the
    thoughts of earlier turns."""
    others = {name: value for name, value in message.items() if name not in REASONING}
    return {**others, "content": ""} if others.get("content") is None else others


def _arguments(body: Wire) -> Wire:
    """The arguments of IBM's `chat` for a body of OpenAI's API."""
    params = dict(body)
    arguments: Wire = {"messages": params.pop("messages"), "tools": params.pop("tools", None)}
    choice = params.pop("tool_choice", None)
    arguments["tool_choice" if isinstance(choice, Mapping) else "tool_choice_option"] = choice
    return {**_without_none(**arguments), "params": params or None}


def _without_none(**arguments: Any) -> Wire:
    return {name: value for name, value in arguments.items() if value is not None}


def _params_dict(params: Any) -> Wire | None:
    """Parameters as a dictionary; IBM's SDK also has classes for them."""
    if params is None or isinstance(params, dict):
        return params
    fields: Wire = params.to_dict()
    return fields


def _generated_text(response: Any) -> str:
    if isinstance(response, str):
        return response
    return "".join(result.get("generated_text") or "" for result in response.get("results") or ())


def _has_ended(piece: Wire) -> bool:
    """Whether the piece has a final stop reason."""
    reasons = (result.get("stop_reason") for result in piece.get("results") or ())
    return any(reason not in (None, "", UNFINISHED) for reason in reasons)


def _with_text(response: Any, text: str) -> Any:
    if isinstance(response, str):
        return text
    results = response.get("results") or [{}]
    return {**response, "results": [{**results[0], "generated_text": text}, *results[1:]]}


def _joined(events: Sequence[Event]) -> str:
    return "".join(each.separated for each in events if isinstance(each, TextDelta))


def _from_environment() -> Wire | None:
    url, key = os.environ.get(URL), os.environ.get(KEY)
    return _without_none(url=url, api_key=key) if url else None


def _endpoint(credentials: Any, max_retries: int | None) -> Endpoint | None:
    """The endpoint of credentials for another server; None for watsonx itself."""
    get = credentials.get if isinstance(credentials, Mapping) else partial(getattr, credentials)
    url = get("url", None) if credentials is not None else None
    if not isinstance(url, str) or not url.startswith(ENDPOINT):
        return None
    endpoint = Endpoint(url.removeprefix(ENDPOINT), get("api_key", None))
    return endpoint if max_retries is None else replace(endpoint, max_retries=max_retries)


def _vendors_class() -> Any:
    try:
        return importlib.import_module("ibm_watsonx_ai.foundation_models").ModelInference
    except ModuleNotFoundError as error:
        raise SettingsError(
            "watsonx needs IBM's package: `pip install 'mlx-local-server[watsonx]'`. For another "
            f"server give credentials with a URL such as {ENDPOINT}http://127.0.0.1:8000/v1."
        ) from error


__all__ = ["ModelInference"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in ("ibm_watsonx_ai", "ibm_watsonx_ai.foundation_models"):
        try:
            vendor = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{name} comes from IBM's package. Install it with "
                "`pip install 'mlx-local-server[watsonx]'`."
            ) from error
        if hasattr(vendor, name):
            return getattr(vendor, name)
    raise AttributeError(f"neither {__name__!r} nor IBM's package has {name!r}")
