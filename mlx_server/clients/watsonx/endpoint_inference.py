"""The methods of IBM's `ModelInference` for any server of OpenAI's API."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from mlx_server.clients.endpoint import COMPLETIONS, Endpoint
from mlx_server.errors import BadRequest
from mlx_server.upstream.learning import facts_in

Wire = dict[str, Any]

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
        found = self._generated(prompt, params)
        return found if raw else _text_of(found)

    def generate_text_stream(
        self, prompt: str | None, params: Wire | None = None, **given: Any
    ) -> Iterator[Any]:
        raw = given.pop("raw_response", False)
        _check_supported(given)
        for chunk in self.endpoint.stream(self._text_body(prompt or "", params), COMPLETIONS):
            found = self._results(chunk)
            if found["results"]:
                yield found if raw else _text_of(found)

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
