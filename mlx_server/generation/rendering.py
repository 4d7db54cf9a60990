"""Renders and tokenises a request's prompts, without the lines that some clients change in every
request, and refuses those that exceed the context."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile

from mlx_server import limits
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.pictures import expanded, with_pictures
from mlx_server.messages import Conversation, Media, media_places, memory_of
from mlx_server.pool.prepare import ModelSpec, PreparedModel, completed
from mlx_server.prompts import message_normalization
from mlx_server.prompts.infill import InfillTokens, infill_prompt, infill_tokens_of
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.requests import GenerateRequest, Infill, Prompt

BYTES_PER_TOKEN = 24
"""An upper bound of a text's bytes in memory for each token, on average. Of the texts measured,
English with emoji has the most: 18, since each character takes four bytes."""


def check_text(prepared: PreparedModel, request: GenerateRequest) -> None:
    """Raise ContextTooLong if the text of all the request's fields together takes more memory than
    a full context could, so that no time is spent on rendering it."""
    most = max(limits.PROMPT_TEXT_BYTES, BYTES_PER_TOKEN * prepared.context_length)
    around = memory_of(replace(request, prompts=()))
    for prompt in request.prompts:
        found = around + (len(prompt) if isinstance(prompt, tuple) else memory_of(prompt))
        if found > most:
            raise ContextTooLong(
                f"The request's text, including tools and options, takes {found} bytes of memory. "
                f"The limit for {prepared.id}, with a context of {prepared.context_length} tokens, "
                f"is {most} bytes. Shorten the request.",
                param=_param(prompt),
            )


def tool_output_tokens(prepared: PreparedModel, prompt: Prompt) -> int:
    """The tokens of the tool results at the end of the prompt. Earlier results were counted with
    the request that first had them."""
    if not isinstance(prompt, Conversation):
        return 0
    new = takewhile(lambda message: message.role == "tool", reversed(prompt.messages))
    return sum(len(prepared.checkpoint.tokenizer.encode(message.content)) for message in new)


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, Conversation) else "prompt"


def render(prepared: PreparedModel, prompt: Prompt) -> RenderedPrompt:
    param = _param(prompt)
    characters = _characters(prompt)
    if characters >= prepared.context_length:
        # tokenising a prompt that is far too long could take a minute, so it is refused before
        _check_length(prepared, characters // prepared.checkpoint.tokenizer.longest, param)
    try:
        rendered = tokenized(prepared, prompt)
    except ContextTooLong as error:
        error.param = param
        raise
    if not rendered.tokens:
        raise BadRequest("The prompt is empty.", param=param)
    _check_length(prepared, len(rendered.tokens), param)
    return rendered


def _check_length(prepared: PreparedModel, tokens: int, param: str) -> None:
    if tokens >= prepared.context_length:
        raise ContextTooLong(
            f"The prompt has at least {tokens} tokens; the context of {prepared.id} is "
            f"{prepared.context_length} tokens, including the answer. Shorten the prompt.",
            param=param,
        )


def _characters(prompt: Prompt) -> int:
    match prompt:
        case Conversation(messages):
            return sum(len(message.content) for message in messages)
        case str():
            return len(prompt)
        case Infill():
            return len(prompt.prefix) + len(prompt.suffix)
    return 0


def tokenized(prepared: PreparedModel, prompt: Prompt) -> RenderedPrompt:
    match prompt:
        case Conversation():
            return chat_prompt(prepared, prompt)
        case str():
            tokenizer = prepared.checkpoint.tokenizer
            return RenderedPrompt(tokenizer.encode_prompt(prompt, prepared.context_length))
        case Infill():
            tokens = infill_tokens(prepared)
            return infill_prompt(prepared.checkpoint, tokens, prompt, prepared.context_length)
        case ids:
            return RenderedPrompt(list(ids))


def infill_tokens(prepared: PreparedModel) -> InfillTokens:
    if tokens := infill_tokens_of(prepared.checkpoint.tokenizer):
        return tokens
    raise BadRequest(
        f"{prepared.id} can't insert text before a suffix: its vocabulary has no delimiters for "
        "that. /v1/models says which models can (`capabilities.fill_in_the_middle`).",
        param="suffix",
    )


def chat_prompt(prepared: PreparedModel, conversation: Conversation) -> RenderedPrompt:
    conversation = completed(prepared.spec, conversation)
    family, checkpoint, most = prepared.family, prepared.checkpoint, prepared.context_length
    unseen = tuple(media_places([conversation]))
    if unseen and prepared.vision:
        shown, pictures = with_pictures(conversation, prepared.vision)
        rendered = family.render(checkpoint, shown, most)
        if prompt := expanded(rendered, pictures, prepared.vision, checkpoint.tokenizer):
            return replace(prompt, unseen=tuple(media_places([shown])))
    return replace(family.render(checkpoint, conversation, most), unseen=unseen)


def without_volatile_lines(request: GenerateRequest) -> tuple[GenerateRequest, tuple[str, ...]]:
    """The request without volatile lines, and the names of those that were removed."""
    cleaned = [_cleaned(prompt) for prompt in request.prompts]
    names = dict.fromkeys(name for _, found in cleaned for name in found)
    return replace(request, prompts=tuple(prompt for prompt, _ in cleaned)), tuple(names)


def _cleaned(prompt: Prompt) -> tuple[Prompt, tuple[str, ...]]:
    if isinstance(prompt, Conversation):
        return message_normalization.without_volatile_lines(prompt)
    return prompt, ()


def check_media(
    spec: ModelSpec, request: GenerateRequest, takes: Callable[[Media], bool] = lambda _: False
) -> None:
    """Raise BadRequest for media that the model can't take in the newest question, if its owner
    wants that. Those of the history are never refused: the client sends them again with each
    turn."""
    if spec.images != "refuse":
        return
    for medium in (each for prompt in request.prompts for each in _in_question(prompt)):
        if not takes(medium):
            raise BadRequest(
                f"{spec.id} can't be sent this {medium.kind}: {medium.why}. Leave it out, or use "
                "another model.",
                param=medium.place,
            )


def _in_question(prompt: Prompt) -> Iterator[Media]:
    """The media of the user's messages at the end of a conversation."""
    messages = prompt.messages if isinstance(prompt, Conversation) else ()
    for message in takewhile(lambda message: message.role == "user", reversed(messages)):
        yield from message.media
