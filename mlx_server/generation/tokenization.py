"""Tokenises texts and conversations and decodes tokens, for requests that generate nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from mlx_server import limits
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.pictures import with_vocabulary
from mlx_server.generation.plan import with_continued_messages
from mlx_server.generation.rendering import chat_prompt, check_text, without_volatile_lines
from mlx_server.messages import Conversation
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.control_token_guard import text_tokens as as_text
from mlx_server.requests import GenerateRequest


def text_tokens(
    prepared: PreparedModel, text: str, param: str, *, add_special_tokens: bool
) -> list[int]:
    """The tokens of the text, in which names of special tokens become those tokens. Raises
    BadRequest, which names `param`, for a text with too many tokens."""
    tokenizer, most = prepared.checkpoint.tokenizer, limits.TOKENIZED
    with _limited(param) as tokens:
        tokens += tokenizer.encode_prompt(text, most, add_special_tokens=add_special_tokens)
    return tokens


def literal_tokens(
    prepared: PreparedModel, text: str, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Like `text_tokens`, except that names of special tokens stay text."""
    with _limited(param) as tokens:
        tokens += as_text(prepared.checkpoint, text, limits.TOKENIZED)
        if add_special_tokens:
            tokens[:] = prepared.checkpoint.tokenizer.with_special_tokens(tokens)
    return tokens


def chat_tokens(
    prepared: PreparedModel, request: GenerateRequest, *, add_special_tokens: bool
) -> list[int]:
    """The tokens of the request's one conversation.

    add_special_tokens: whether to add also those of a plain text, although a chat template has its
    own.
    """
    check_text(prepared, request)
    request, _ = without_volatile_lines(request)
    (conversation,) = with_continued_messages(prepared, request).prompts
    assert isinstance(conversation, Conversation)
    spec = replace(prepared.spec, context_length=limits.TOKENIZED)
    with _limited("messages") as tokens:
        prompt = chat_prompt(replace(prepared, spec=spec), conversation)
        tokens += with_vocabulary(prompt, prepared.vision.token if prepared.vision else 0)
        if add_special_tokens:
            tokens[:] = prepared.checkpoint.tokenizer.with_special_tokens(tokens)
    return tokens


def text_of(prepared: PreparedModel, tokens: Sequence[int]) -> str:
    """The text of the tokens, special ones included. Raises BadRequest for ids outside the
    vocabulary."""
    tokenizer = prepared.checkpoint.tokenizer
    unknown = min((id for id in set(tokens) if tokenizer.entry(id) is None), default=None)
    if unknown is not None:
        raise BadRequest(
            f"`tokens` has the id {unknown}, but the tokenizer of {prepared.id} has no such token.",
            param="tokens",
        )
    return tokenizer.raw(list(tokens))


@contextmanager
def _limited(param: str) -> Iterator[list[int]]:
    """A list for tokens. Raises BadRequest if the block puts too many into it."""
    tokens: list[int] = []
    most = limits.TOKENIZED
    with suppress(ContextTooLong):
        yield tokens
        if len(tokens) <= most:
            return
    raise BadRequest(f"`{param}` should have no more than {most} tokens. Split it.", param=param)
