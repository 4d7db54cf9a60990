"""Renders and tokenises a request's prompts, and refuses those that exceed the context."""

from dataclasses import replace
from itertools import takewhile

from mlx_server import limits
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.families.base import RenderedPrompt
from mlx_server.generation.constraints import template_kwargs
from mlx_server.messages import Conversation
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.text_size import memory_of
from mlx_server.requests import GenerateRequest, Prompt

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
    return 0


def tokenized(prepared: PreparedModel, prompt: Prompt) -> RenderedPrompt:
    match prompt:
        case Conversation():
            return chat_prompt(prepared, prompt)
        case str():
            tokenizer = prepared.checkpoint.tokenizer
            return RenderedPrompt(tokenizer.encode_prompt(prompt, prepared.context_length))
        case ids:
            return RenderedPrompt(list(ids))


def chat_prompt(prepared: PreparedModel, conversation: Conversation) -> RenderedPrompt:
    completed = replace(conversation, template_kwargs=template_kwargs(prepared, conversation))
    if prepared.spec.schema_in_prompt == "never":
        completed = replace(completed, response_format=None)
    return prepared.family.render(prepared.checkpoint, completed, prepared.context_length)
