"""Renders a conversation to a prompt with the checkpoint's chat template.

What a template renders is known from samples (see template_capabilities.py), but no sample shows
what it does with every conversation. So each prompt is searched for the messages that it was made
of. Templates trim, escape and edit texts: one counts as lost only if most of its words are missing.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlx_server import limits
from mlx_server.engine.messages import Picture
from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.messages import Conversation, Message, PicturePart, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.prompts.branches import Branches, find_branches
from mlx_server.prompts.continuation import ReasoningText, continued_prompt
from mlx_server.prompts.control_token_guard import ControlTokenGuard
from mlx_server.prompts.history_rendering import Escape, WriteCalls
from mlx_server.prompts.message_normalization import (
    REASONING_KEYS,
    THINK_DELIMITERS,
    CallId,
    OwnText,
    Part,
    TemplateCapabilities,
    Turn,
    arguments_object,
    fallbacks,
    fit_to_template,
    format_text,
    function_json,
    joined,
    text_parts,
    think_delimiters,
    to_turns,
    tools_text,
    with_question_text,
    with_system_text,
)
from mlx_server.prompts.template_capabilities import (
    TOOL_VARIABLES,
    default_system,
    effort_word,
    efforts_to_try,
    schema_variables,
    switches,
    template_capabilities,
    with_effort_word,
)
from mlx_server.request_threads import check_wanted
from mlx_server.system.sandbox.chat_template import ChatTemplate, RefusedByTemplate, broken

EXCERPT = 200
"""Characters of a text that are looked for, since a template drops a text as a whole."""

NEAR = 4096
"""Characters of a prompt after a message within which the next one is looked for as it is."""

WORDS = 3
"""Words of an edited text that are looked for, the longest ones."""

EDITED = 64
"""Texts of a conversation that are looked for in every way, which takes longest."""

PLAIN = re.compile(r"[^\W_][\w ]{11,60}")
"""Matches a piece of text that no template edits, and that no other text has by chance."""

SWITCH = re.compile(r"/(?:no_?)?think\b")
"""Matches what a user switches thinking with, which templates take out of the text."""

WORD = re.compile(r"\w+")


def lost_texts(messages: Sequence[Message], prompt: str, escaped: Escape) -> Iterator[int]:
    """Yields the indices of messages whose text is not in the prompt, which is marked text."""
    at = near = edited = 0
    for i, message in enumerate(messages):
        near += len(message.content) + NEAR
        # most texts are found at once, in their order, so that a long prompt is read once
        text = _beginning(message.content)
        if text and (place := prompt.find(text, at, near)) >= 0:
            at, near = place, place + len(message.content)
            continue
        if not (text := _sought(message)):
            continue
        plain = PLAIN.search(text)
        place = prompt.find(plain[0], at) if plain else -1
        if place < 0 and edited <= EDITED:
            place = _place(prompt, escaped(text), at)
        if place >= 0:
            at, near = place, place + len(message.content)
            continue
        edited += 1
        if edited > EDITED or not _has_words(prompt, text, escaped):
            yield i


def _sought(message: Message) -> str:
    """Returns the beginning of the text; of an assistant's, of what follows its reasoning."""
    text = message.content
    if message.role == "assistant":
        for _, end in THINK_DELIMITERS:
            text = text[text.rfind(end) + len(end) :] if end in text else text
    return _beginning(text)


def _beginning(text: str) -> str:
    return text[: 2 * EXCERPT].strip()[:EXCERPT]


def _place(prompt: str, text: str, at: int) -> int:
    """Returns a place of the text, as it is or as JSON; -1 if there is none."""
    for form in _forms(text):
        place = prompt.find(form, at)
        if place >= 0 or (place := prompt.find(form)) >= 0:
            return place
    return -1


def _forms(text: str) -> Iterator[str]:
    """Yields the text, followed by JSON of it."""
    yield text
    for is_ascii in (False, True):
        if (form := json.dumps(text, ensure_ascii=is_ascii)[1:-1]) != text:
            yield form


def _has_words(prompt: str, text: str, escaped: Escape) -> bool:
    """Whether the prompt has most of a text's words, by their length: short ones are everywhere."""
    if not (plain := SWITCH.sub(" ", text).strip()):
        return True
    words = sorted(WORD.findall(plain) or [plain], key=len)[-WORDS:]
    forms = [{*_forms(word), *_forms(escaped(word))} for word in words]
    shared = (
        word for word, each in zip(words, forms, strict=True) if any(f in prompt for f in each)
    )
    return 2 * sum(map(len, shared)) >= sum(map(len, words))


Json = dict[str, Any]

SCHEMA_SHARE = 8
"""A schema is described in at most this part of the context."""


@dataclass(frozen=True)
class RenderedPrompt:
    tokens: list[int]
    ignored: tuple[str, ...] = ()
    """Names of the parameters that the request set and the template does not read."""
    branches: Callable[[], Branches] = field(default=Branches, compare=False)
    """Finds the lengths at which the next requests are expected to differ from the prompt."""
    pictures: tuple[Picture, ...] = ()
    unseen: tuple[str, ...] = ()
    """The places of media that the model is not shown."""


def as_given(id: str, name: str, number: int) -> str:
    return id


@dataclass(frozen=True)
class RenderOptions:
    """The parts of rendering that a family's templates leave to the caller."""

    roles: dict[str, str]
    call_id: CallId
    write_calls: WriteCalls
    tools_in_prompt: bool = False
    """Whether tools are described in the system prompt, and calls and results are text."""
    reasoning: ReasoningText | None = None
    """The text around reasoning; None if the model has none."""


def render_prompt(
    checkpoint: Checkpoint,
    conversation: Conversation,
    options: RenderOptions,
    most: int | None = None,
) -> RenderedPrompt:
    template = (conversation.tools and checkpoint.tool_template) or checkpoint.template
    if not template:
        raise BadRequest(
            "This model has no chat template. Use /v1/completions, or set `chat_template:` "
            "for it in models.yaml.",
            param="messages",
        )
    guard = ControlTokenGuard(checkpoint, conversation)
    rendering = _Rendering(checkpoint, template, conversation, options, guard, most)
    if conversation.continued:
        text = continued_prompt(conversation, rendering.prompt, guard, options.reasoning)
    else:
        begins = conversation.add_generation_prompt
        text = rendering.prompt(conversation.messages, generation_prompt=begins)
    tokens = guard.tokens(text, most)
    ignored = tuple(rendering.ignored(text))
    branches = partial(find_branches, conversation, rendering.prompt, text, tokens, guard)
    return RenderedPrompt(tokens, ignored, branches=branches)


class _Rendering:
    """Renders the messages of one conversation, all or some of them, with its tools and options."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        template: ChatTemplate,
        conversation: Conversation,
        options: RenderOptions,
        guard: ControlTokenGuard,
        most: int | None,
    ) -> None:
        self._tokens = checkpoint.tokens
        self._template = template
        self._conversation = conversation
        self._options = options
        self._escaped = guard.escaped
        kwargs = conversation.template_kwargs
        self._switched = switches(kwargs, self._takes)
        self._word = "" if self._switched else effort_word(kwargs, template.source)
        self._taken = [name for name in kwargs if self._takes(name)]
        self._efforts = efforts_to_try(kwargs.get("reasoning_effort"), template.source)
        detected = template_capabilities(template, checkpoint.tokens)
        self._tells_tools = bool(conversation.tools) and options.tools_in_prompt
        # calls in another format than the template's own, which it must not render
        as_text = replace(detected, calls="never", text_with_calls="together", results="never")
        self._capabilities = as_text if self._tells_tools else detected
        self._tools = TemplateTools(conversation.tools, self._capabilities, template, self._escaped)
        schema = described_schema(conversation.response_format, checkpoint.tokenizer, most)
        self._has_long_schema = bool(conversation.response_format) and schema is None
        self._schema, self._schema_variables = schema, dict[str, Any]()
        self._searched: tuple[str, list[int]] = "", []
        """The latest prompt of all messages, and the messages whose texts it lacks."""
        parts = (part for message in conversation.messages for part in message.parts)
        self._pictures = {p.placeholder: p.text for p in parts if isinstance(p, PicturePart)}
        if schema and "schema" in schema and self._capabilities.schema != "never":
            values = schema_variables(self._capabilities.schema, schema)
            self._schema, self._schema_variables = None, guard.escaped(values)

    def _takes(self, name: str) -> bool:
        return self._template.takes(name) and name not in self._tokens

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = True,
        further_tools: Sequence[Tool] = (),
    ) -> str:
        """Returns the prompt as marked text. further_tools: tools that follow the conversation's
        own."""
        if self._word:
            messages = with_effort_word(tuple(messages), self._word)
        source, capabilities = self._template.source, self._capabilities
        delimiters = think_delimiters(source, capabilities)
        turns = to_turns(messages, self._options.roles, self._options.call_id, delimiters)
        offered = replace(self._tools, tools=(*self._tools.tools, *further_tools))
        turns = self._with_added_text(turns, offered.tools)
        keys = [key for key in REASONING_KEYS if key in source]

        def variables(m: TemplateCapabilities, effort: object) -> Json:
            rendered = [
                message_json(turn, m, self._options, self._escaped, keys)
                for turn in fit_to_template(turns, m)
            ]
            return {**offered.variables(rendered), **self._variables(generation_prompt, effort)}

        efforts = self._efforts if "reasoning_effort" in self._taken else [None]
        variants = (
            partial(variables, m, effort) for effort in efforts for m in fallbacks(capabilities)
        )

        def losses(prompt: str) -> int:
            lost = list(lost_texts(messages, prompt, self._escaped))
            if messages is self._conversation.messages:
                self._searched = prompt, lost
            # an assistant's text is no reason to render its calls as text
            return sum(messages[i].role != "assistant" for i in lost)

        prompt = shown = best_accepted(self._template, variants, losses)
        for placeholder, text in self._pictures.items():
            shown = shown.replace(placeholder, text)
        if self._searched[0] == prompt:
            self._searched = shown, self._searched[1]
        return shown

    def _variables(self, generation_prompt: bool, effort: object) -> Json:
        kwargs = {**self._conversation.template_kwargs, "reasoning_effort": effort}
        return {
            **self._tokens,
            **self._switched,
            **{name: self._escaped(kwargs[name]) for name in self._taken},
            **self._schema_variables,
            "add_generation_prompt": generation_prompt,
        }

    def _with_added_text(self, turns: list[Turn], offered: Sequence[Tool]) -> list[Turn]:
        tools = tools_text(offered) if self._tells_tools else []
        schema = format_text(self._schema) if self._schema else []
        if not (added := joined(tools, schema)):
            return turns
        if self._capabilities.system == "question":
            return with_question_text(turns, added)
        return with_system_text(turns, added, self._default_system)

    def _default_system(self) -> str:
        variables = self._variables(True, self._efforts[0])
        return default_system(self._template, variables, self._capabilities.parts)

    def _drops_name(self, message: Message) -> bool:
        if not message.name or message.role == "tool":
            return False
        role = self._options.roles.get(message.role, message.role)
        return role not in self._capabilities.names

    def ignored(self, prompt: str) -> Iterator[str]:
        """Yields the names of the parameters that the template does not read, and of the texts that
        the prompt lacks. Raises ModelUnusable if these are all that a user may say."""
        used = {*self._taken, *({"reasoning_effort"} if self._switched or self._word else ())}
        for name in self._conversation.template_kwargs:
            if name not in used:
                yield f"chat_template_kwargs.{name}"
        if self._tools.is_ignored and not self._tells_tools:
            yield "tools"
        if self._has_long_schema:
            yield "schema_in_prompt"
        if any(self._drops_name(message) for message in self._conversation.messages):
            yield "messages.name"
        searched, lost = self._searched
        if prompt != searched:
            lost = list(lost_texts(self._conversation.messages, prompt, self._escaped))
        for i in lost:
            if self._conversation.messages[i].role == "user" and not self._capabilities.shows_user:
                raise ModelUnusable(
                    "The model's chat template renders no text of a user, neither as a string nor "
                    "as parts. Set another one with `chat_template:` in models.yaml."
                )
            yield f"messages[{i}].content"


def described_schema(
    schema: Mapping[str, Any] | None, tokenizer: Tokenizer, most: int | None
) -> Mapping[str, Any] | None:
    """Returns the schema, unless its text is longer than a prompt should spend on it."""
    if schema is None:
        return None
    limit = limits.SCHEMA_PROMPT_TOKENS
    limit = limit if most is None else min(limit, most // SCHEMA_SHARE)
    text = json.dumps(schema, ensure_ascii=False)
    is_short = len(text) <= limit * tokenizer.longest and len(tokenizer.encode(text)) <= limit
    return schema if is_short else None


def best_accepted(
    template: ChatTemplate, variants: Iterable[Callable[[], Json]], losses: Callable[[str], int]
) -> str:
    """Returns the prompt of the first variant that the template accepts without losses; else the
    one with the fewest. Raises the first refusal if it accepts none."""
    refusal: RefusedByTemplate | None = None
    best, fewest = "", -1
    for variables in variants:
        check_wanted()
        try:
            prompt = template.render_made(variables)
        except RefusedByTemplate as error:
            refusal = refusal or error
            continue
        if not (count := losses(prompt)):
            return prompt
        if fewest < 0 or count < fewest:
            best, fewest = prompt, count
    if fewest < 0:
        assert refusal
        raise broken(refusal) if refusal.lacks else refusal
    return best


@dataclass(frozen=True)
class TemplateTools:
    """Passes the tools to a template where it renders them from."""

    tools: Sequence[Tool]
    capabilities: TemplateCapabilities
    template: ChatTemplate
    escaped: Escape

    @property
    def is_ignored(self) -> bool:
        return bool(self.tools) and self.capabilities.tools == "never"

    def variables(self, messages: list[Json]) -> Json:
        """Returns `messages`, `tools`, and any other variable in which the template looks for
        tools."""
        tools = [tool_json(tool, self.escaped) for tool in self.tools]
        if tools and self.capabilities.tools == "system":
            messages = _in_the_systems(messages, tools)
        # SmolLM3's template takes any value of `xml_tools` for tools
        offered = tools and self.capabilities.tools == "variable"
        names = [name for name in TOOL_VARIABLES if name in self.template.reads] if offered else []
        return {"messages": messages, "tools": None, **dict.fromkeys(names, tools)}


def _in_the_systems(messages: list[Json], tools: list[Json]) -> list[Json]:
    """Puts the tools into the system message, as text: Phi-4-mini's template reads them there."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    leads = bool(messages) and messages[0]["role"] == "system"
    system = messages[0] if leads else {"role": "system", "content": ""}
    return [{**system, "tools": text}, *messages[leads:]]


def message_json(
    turn: Turn,
    capabilities: TemplateCapabilities,
    options: RenderOptions,
    escaped: Escape,
    reasoning_keys: Sequence[str],
) -> Json:
    """Returns the turn in the form that Hugging Face's templates read."""
    reasoning = escaped(turn.reasoning)
    optional = {
        "name": escaped(turn.name),
        "tool_calls": [call_json(call, capabilities, escaped) for call in turn.calls],
        "tool_call_id": escaped(turn.call_id),
        **(dict.fromkeys(reasoning_keys, reasoning) if capabilities.reasoning != "part" else {}),
    }
    content: Any = "".join(part_text(part, options.write_calls, escaped) for part in turn.parts)
    if reasoning and capabilities.reasoning == "part":
        text: Any = text_parts(content) if content else []
        content = [{"type": "thinking", "thinking": reasoning}, *text]
    elif turn.calls and not content:
        content = capabilities.empty_content
    elif turn.role in capabilities.parts:
        content = text_parts(content)
    present = {key: value for key, value in optional.items() if value}
    return {"role": turn.role, "content": content, **present}


def part_text(part: Part, write_calls: WriteCalls, escaped: Escape) -> str:
    match part:
        case str():
            return str(escaped(part))
        case OwnText(text):
            return text
    return write_calls(part, escaped)


def call_json(call: ToolCall, capabilities: TemplateCapabilities, escaped: Escape) -> Json:
    arguments = (
        call.arguments if capabilities.arguments == "text" else arguments_object(call.arguments)
    )
    function = {"name": escaped(call.name), "arguments": escaped(arguments)}
    return {"id": escaped(call.id), "type": "function", "function": function}


def tool_json(tool: Tool, escaped: Escape) -> Json:
    function = {name: escaped(value) for name, value in function_json(tool).items()}
    return {"type": "function", "function": function}
