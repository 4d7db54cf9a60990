"""Wire types that the endpoints share. They are strict: `true` is not 1, and `"5"` is not 5.

OpenAI's clients send null for fields that are not set, so null always means unset.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypedDict, TypeGuard, TypeVar, cast
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    field_validator,
)

from mlx_server import limits
from mlx_server.api.accumulator import Reporting
from mlx_server.errors import BadRequest
from mlx_server.messages import Role, Tool
from mlx_server.prompts.template_capabilities import EFFORTS
from mlx_server.requests import NamedTool, SamplingChoices, ServiceTier, ToolChoice

MAX_ADAPTER_SCALE = 4
IGNORED_HEADER = "x-mlx-server-ignored"
REPORTED_ELSEWHERE = ""
"""Stands for the name of an object that is used, or that generation reports where it is not."""

T = TypeVar("T")


def _breathe(item: T) -> T:
    """Does nothing: calling Python between two items makes pydantic let other threads run."""
    return item


Items = Annotated[list[Annotated[T, AfterValidator(_breathe)]], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a body may have thousands of wrong ones, and
pydantic keeps a report of each."""


class MendedItems(list[Any]):
    """The items of a list that could not be read as it was sent."""

    def __init__(self, items: Iterable[Any], unread: Iterable[str]) -> None:
        """unread: the paths within an item of what was left out, empty for a whole item."""
        super().__init__(items)
        self.unread = tuple(unread)


def _whole(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer() and -(2**63) <= value < 2**63
    return int(value) if is_whole else value


WHOLE = BeforeValidator(_whole)
"""Takes whole numbers with a point too, `40.0`, as sliders, Lua and proxies write them.
A number that 64 bits can't hold, `1e308`, is not one that anybody counts with."""


def minus_one_is(meant: int | None) -> BeforeValidator:
    def read(value: Any) -> Any:
        return meant if type(value) in (int, float) and value == -1 else value

    return BeforeValidator(read)


def _unset(value: Any) -> Any:
    if isinstance(value, list):
        return [item for item in value if item != ""]
    return None if value == "" else value


EMPTY_IS_UNSET = BeforeValidator(_unset)
"""Forms and templates of clients send an empty text, or a list with one, where nothing is set."""


MaxTokens = Annotated[Annotated[int, Field(ge=1), WHOLE] | None, minus_one_is(None)]
"""-1 sets no limit, as in LM Studio and llama.cpp."""
TopK = Annotated[Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None, minus_one_is(0)]
"""-1 and 0 allow every token, as in vLLM."""

Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=limits.STOP_CHARACTERS)]
Biases = Annotated[dict[str, Bias], Field(max_length=limits.LOGIT_BIASES, fail_fast=True)]
StopStrings = Annotated[Items[StopString], Field(max_length=limits.STOP_STRINGS)]

ThinkingTokens = Annotated[int, Field(ge=0, lt=2**53), WHOLE]
ResponseTokens = Annotated[int, Field(ge=1, lt=2**53), WHOLE]


def as_text(value: Any) -> Any:
    is_text = value is None or isinstance(value, str)
    return value if is_text else json.dumps(value, ensure_ascii=False)


Text = Annotated[str | None, BeforeValidator(as_text)]
"""A text of an earlier message. What is not a string is read as its JSON: clients send the results
of tools and the names of calls as they have them."""
Arguments = Annotated[str | None, BeforeValidator(lambda value: as_text(value or None))]
"""The arguments of an earlier call, which a model may have written as any JSON. PHP has `[]` for
none."""


def _known_effort(effort: str) -> str:
    if effort not in EFFORTS:
        raise ValueError(f"should be one of {', '.join(EFFORTS)}")
    return effort


Effort = Annotated[
    Annotated[str, Field(json_schema_extra={"enum": list(EFFORTS)}), AfterValidator(_known_effort)]
    | None,
    EMPTY_IS_UNSET,
]

CHOICES = tuple(SamplingChoices.__annotations__)
ADAPTER_NAMES = ("adapter", "adapters", "adapter_path", "lora_path", "adapter_id")


def the_only(values: Mapping[str, T], sets: str) -> T | None:
    """The value that a client gave under one of its names. Raises BadRequest for two of them.

    sets: what the names do, as in "both set the thinking budget"."""
    if len(values) > 1:
        one, other, *_ = values
        raise BadRequest(f"`{one}` and `{other}` {sets}: send only one of them.", param=other)
    return next(iter(values.values()), None)


class SharedFields(TypedDict):
    """The fields of a `GenerateRequest` that all endpoints fill alike."""

    adapter: str | None
    adapter_scale: float
    on_disk: bool
    stop: tuple[str, ...]
    choices: SamplingChoices
    logit_bias: dict[int, float]
    seed: int | None
    include_raw: bool | None
    service_tier: ServiceTier | None


class WireModel(BaseModel):
    """An object of a body. It takes fields that it does not know, which `ignored` lists."""

    # validators are built when they are first used: all together they would delay the start
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, defer_build=True)

    ACCEPTED: ClassVar[frozenset[str]] = frozenset()
    """Further fields, which need no effect: labels of the client, and what an earlier answer had.
    They are not reported as ignored."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}
    """Fields that are refused unless they are null or empty, with the reason."""

    def unused(self) -> Iterable[str]:
        """Names of the known fields that were set and have no effect."""
        return ()

    def ignored_as(self) -> str | None:
        """The name under which the whole object is reported, if none of it has an effect, or
        REPORTED_ELSEWHERE. None: its fields are reported."""
        return None

    def ignored(self) -> list[str]:
        """Paths of the fields without effect, at every depth, without the numbers of list items.
        Raises BadRequest for a field in `UNSUPPORTED`."""
        paths: dict[str, None] = {}
        for path in _ignored_paths(self, ""):
            if len(paths) < limits.IGNORED_NAMES:
                paths[path] = None
        return list(paths)


def type_of(value: Any) -> Any:
    """The `type` of an object of a body, be it validated or not."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def by_type(*known: str, otherwise: str = "other", untyped: str = "") -> Discriminator:
    """Chooses among a union's members by their tags, which are no field names, so that errors show
    only field names. untyped: the tag of one without a type."""

    def tag(value: Any) -> str:
        kind = type_of(value)
        if kind in known:
            return f"<{kind}>"
        return f"<{otherwise}>" if isinstance(kind, str) else f"<{untyped or otherwise}>"

    return Discriminator(tag)


def _ignored_paths(node: WireModel | list[Any], path: str) -> Iterator[str]:
    if isinstance(node, MendedItems):
        yield from (f"{path}{name}".rstrip(".") for name in node.unread)
    if isinstance(node, list):
        # the items of a list are either all objects or all values, but for JSON in it
        for item in node if node and _is_nested(node[0]) else ():
            if _is_nested(item):
                yield from _ignored_paths(item, path)
        return
    if (kind := node.ignored_as()) is not None:
        if kind != REPORTED_ELSEWHERE:
            yield f"{path}{kind}"
        return
    for name, value in (node.model_extra or {}).items():
        if value is None or name in node.ACCEPTED:
            continue
        if name not in node.UNSUPPORTED:
            yield f"{path}{name}"
        elif value != "":
            reason = node.UNSUPPORTED[name]
            raise BadRequest(f"`{path}{name}` is not supported: {reason}.", param=f"{path}{name}")
    for name in node.unused():
        yield f"{path}{name}"
    for name, value in node.__dict__.items():
        if _is_nested(value):
            yield from _ignored_paths(value, f"{path}{name}.")


def _is_nested(value: object) -> TypeGuard[WireModel | list[Any]]:
    return isinstance(value, WireModel | list)


Verbosity = Literal["low", "medium", "high"]
USUAL_VERBOSITY = "medium"
"""OpenAI's default, which needs no effect."""


class StreamOptions(WireModel):
    include_progress: bool | None = None
    include_obfuscation: bool | None = None
    """Nothing is added to hide the lengths of deltas."""

    def unused(self) -> Iterable[str]:
        if self.include_obfuscation:
            yield "include_obfuscation"


class UsageStreamOptions(StreamOptions):
    """The options where OpenAI sends no usage unless a client asks for it."""

    include_usage: bool | None = None


class SamplingBody(WireModel):
    """The fields of every endpoint that generates text."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key"}
    )

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "chat_template": "the model's owner sets it in models.yaml",
    }

    adapter: Annotated[str, Field(min_length=1)] | None = None
    adapters: Annotated[str, Field(min_length=1)] | None = None
    """mlx-lm's name for `adapter`."""
    adapter_path: Annotated[str, Field(min_length=1)] | None = None
    """The name that other MLX servers use."""
    lora_path: Annotated[str, Field(min_length=1)] | None = None
    """SGLang's name."""
    adapter_id: Annotated[str, Field(min_length=1)] | None = None
    """LoRAX's name, and that of Text Generation Inference."""
    adapter_scale: Annotated[float, Field(ge=0, le=MAX_ADAPTER_SCALE)] | None = None
    stop: Annotated[StopString | StopStrings | None, EMPTY_IS_UNSET] = None
    include_raw: bool | None = None
    """Whether `mlx_server.raw` has what the model wrote, delimiters included."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    """If false, the prompt cache does not write the request to disk. If true, a chat completion is
    stored."""
    logit_bias: Biases | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for key in biases or {}:
            if not re.fullmatch(r"[0-9]{1,9}", key):
                raise ValueError("the keys should be token ids")
        return biases

    def choices(self) -> SamplingChoices:
        choices = {name: getattr(self, name) for name in CHOICES}
        return cast(SamplingChoices, {k: v for k, v in choices.items() if v is not None})

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def shared_fields(self) -> SharedFields:
        """Raises BadRequest for two adapters."""
        adapters: dict[str, str] = {}
        for name in ADAPTER_NAMES:
            adapter = getattr(self, name)
            if adapter and adapter not in adapters.values():
                adapters[name] = adapter
        return {
            "adapter": the_only(adapters, "name two adapters"),
            "adapter_scale": 1.0 if self.adapter_scale is None else self.adapter_scale,
            "on_disk": self.store is not False,
            "stop": self.stops(),
            "choices": self.choices(),
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "seed": self.seed,
            "include_raw": self.include_raw,
            "service_tier": self.service_tier,
        }


def check_stream_options(stream: bool | None, options: WireModel | None) -> None:
    """Raises BadRequest for options of a stream that is not one, as OpenAI does."""
    if options is not None and not stream:
        raise BadRequest("`stream_options` needs `stream: true`.", param="stream_options")


class GenerationBody(SamplingBody):
    """The fields that `/v1/chat/completions` and `/v1/completions` share."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **SamplingBody.UNSUPPORTED,
        "prompt_logprobs": "send `echo` and `logprobs` to /v1/completions",
        "return_token_ids": "/tokenize has the ids of texts and messages",
    }

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: UsageStreamOptions | None = None
    return_progress: bool | None = None
    """llama.cpp's name for `include_progress`."""
    n: Annotated[int, Field(ge=1, le=limits.ANSWERS), WHOLE] | None = None
    timings_per_token: bool | None = None
    """llama.cpp's: how long prompt and answer took, with the whole answer or its last chunk."""

    @property
    def wants_progress(self) -> bool:
        options = self.stream_options or UsageStreamOptions()
        return bool(self.stream and (options.include_progress or self.return_progress))

    def reporting(self, logprobs: int | None, *, is_stored: bool = False) -> Reporting:
        options = self.stream_options or UsageStreamOptions()
        return Reporting(
            logprobs=logprobs is not None,
            usage=bool(options.include_usage),
            timings=bool(self.timings_per_token),
            has_body=is_stored or not self.stream,
        )


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that lists ignored fields; names are a client's, so they are quoted and cut."""
    value = ", ".join(quote(name[: limits.IGNORED_NAME_CHARACTERS], safe="._-") for name in names)
    return {IGNORED_HEADER: value[: limits.IGNORED_HEADER_CHARACTERS]} if value else {}


ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""`function` is the older name of `tool`, and `ipython` the name that Llama's templates use."""

UNKNOWN_ROLE: Final = "unknown"
"""The role of a message without one. It is reported as any unknown one is."""

RoleName = Annotated[str, Field(min_length=1, json_schema_extra={"examples": [*ROLES]})]


def role_of(name: str) -> Role:
    """The role of this name. A text of an unknown one is shown to the model as the user's."""
    return ROLES.get(name, "user")


class ContinuationBody(WireModel):
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def continues(self) -> bool:
        """Whether the answer continues the last message. Raises BadRequest for a contradiction."""
        begins, continues = self.add_generation_prompt, self.continue_final_message
        if begins and continues:
            raise BadRequest(
                "`continue_final_message: true` continues the last message, and "
                "`add_generation_prompt: true` begins a new one: send only one of them.",
                param="add_generation_prompt",
            )
        if begins is False and continues is False:
            raise BadRequest(
                "`add_generation_prompt: false` needs `continue_final_message: true`: an answer "
                "either begins a message or continues one.",
                param="continue_final_message",
            )
        return bool(continues) or begins is False


SOME_EFFORT = "medium"
"""The effort of a request that turns thinking on and sets no effort."""


class ThinkingParam(WireModel):
    """Anthropic's `thinking`, which other APIs have adopted."""

    type: Literal["enabled", "adaptive", "auto", "disabled"] | None = None
    """The model decides itself how long it thinks, unless there is a budget: the first three are
    the same here."""
    budget_tokens: ThinkingTokens | None = None


class ThinkingBody(WireModel):
    thinking: ThinkingParam | None = None
    enable_thinking: bool | None = None
    """The name that Qwen's own services use."""
    thinking_budget: ThinkingTokens | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def budget(self) -> int | None:
        """The thinking budget in tokens. Raises BadRequest if it is set under two names."""
        return the_only(self.budgets(), "both set the thinking budget")

    def budgets(self) -> dict[str, int]:
        """The budgets that the client set, by their names."""
        # special values of a template, such as -1, are not a budget for the engine
        of_template = (self.chat_template_kwargs or {}).get("thinking_budget")
        is_budget = type(of_template) is int and 0 <= of_template < 2**53
        budgets = {
            "thinking_budget": self.thinking_budget,
            "thinking.budget_tokens": self.thinking.budget_tokens if self.thinking else None,
            "chat_template_kwargs.thinking_budget": of_template if is_budget else None,
        }
        return {name: budget for name, budget in budgets.items() if budget is not None}

    @property
    def effort(self) -> str | None:
        """The effort of the endpoint's own parameter."""
        raise NotImplementedError

    @property
    def effort_param(self) -> str:
        """The name of that parameter."""
        return "reasoning.effort"

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template: the effort, the budget and those of the client."""
        ours = {"reasoning_effort": self._effort(), "thinking_budget": self.budget()}
        variables = {name: value for name, value in ours.items() if value is not None}
        return {**variables, **(self.chat_template_kwargs or {})}

    def param_names(self) -> dict[str, str]:
        """The client's names for the variables that `template_kwargs` sets."""
        kwargs = self.chat_template_kwargs or {}
        effort = self.effort_param if self.effort else next(iter(self.switches()), None)
        sent = {
            "reasoning_effort": effort,
            "thinking_budget": next(iter(self.budgets()), None),
        }
        return {
            f"chat_template_kwargs.{variable}": name
            for variable, name in sent.items()
            if name and variable not in kwargs
        }

    def implied_sampling(self) -> frozenset[str]:
        """Names of template variables that the client did not ask for: the effort of a request that
        turns thinking on and sets only a budget."""
        explicit = self.effort or (self.chat_template_kwargs or {}).get("reasoning_effort")
        wants_budget = any(self.switches().values()) and self.budget() is not None
        return frozenset({"reasoning_effort"} if wants_budget and not explicit else ())

    def _effort(self) -> str | None:
        effort, switches = self.effort, self.switches()
        if not switches:
            return effort
        (switch, is_on), *others = switches.items()
        efforts = {self.effort_param: effort != "none"} if effort else {}
        for name, wants in [*others, *efforts.items()]:
            if wants != is_on:
                raise BadRequest(
                    f"`{switch}` and `{name}` contradict each other: send only one of them.",
                    param=name,
                )
        return effort or (SOME_EFFORT if is_on else "none")

    def switches(self) -> dict[str, bool]:
        """Whether the client wants thinking, by the names under which it says so."""
        switches: dict[str, bool] = {}
        if self.thinking and self.thinking.type:
            switches["thinking.type"] = self.thinking.type != "disabled"
            if not switches["thinking.type"] and self.thinking.budget_tokens is not None:
                raise BadRequest(
                    "`thinking.budget_tokens` needs `thinking.type: enabled`.",
                    param="thinking.budget_tokens",
                )
        if self.enable_thinking is not None:
            switches["enable_thinking"] = self.enable_thinking
        return switches


class DescribedFunction(WireModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool(self, *, strict: bool = False) -> Tool:
        return Tool(self.name, self.description, self.parameters or {}, strict)


class OtherTool(WireModel):
    """A tool that another provider runs or that only its models know, which clients offer to every
    server. It is not offered."""

    type: Annotated[str, Field(min_length=1)]

    def ignored_as(self) -> str:
        return self.type


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    if choice == "required" and not tools:
        raise BadRequest("`tool_choice: required` needs `tools`.", param="tool_choice")
    if isinstance(choice, NamedTool):
        check_offered(choice.name, tools)


def check_usable(unknown: Sequence[str]) -> None:
    """Raises BadRequest for tools of which none can be offered. unknown: their types, empty if
    there are no tools. If there are others too, such tools are only reported."""
    if kinds := list(dict.fromkeys(unknown)):
        names = ", ".join(repr(kind[:64]) for kind in kinds[: limits.IGNORED_NAMES])
        raise BadRequest(
            f"None of the `tools` can be offered: this server has no {names}. Leave `tools` out, "
            "or send tools with a schema of their own.",
            param="tools",
        )


def check_number(tools: Sequence[Tool]) -> None:
    if len(tools) > (most := limits.TOOLS):
        raise BadRequest(
            f"There are {len(tools)} tools, those of namespaces and of the conversation included; "
            f"the limit is {most}. Send fewer.",
            param="tools",
        )


def check_offered(name: str, tools: Sequence[Tool]) -> None:
    if name not in {tool.name for tool in tools}:
        raise BadRequest(
            f"`tool_choice` names {name[:64]!r}, which is not among the `tools`.",
            param="tool_choice",
        )
