"""`POST /tokenize` and `POST /detokenize` on the wire, as vLLM and llama.cpp have them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.chat_completions.input import ChatBody, MessageParam, ToolParam, to_request
from mlx_server.api.completions import Ids
from mlx_server.api.fields import Items, WireModel, ignored_header
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.api.histories import MENDED
from mlx_server.api.models import model_or_default
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.generation.pictures import with_vocabulary
from mlx_server.generation.plan import with_continued_messages
from mlx_server.generation.rendering import chat_prompt, check_text, without_volatile_lines
from mlx_server.http.security import keyed_router
from mlx_server.messages import Conversation, media_places
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.control_token_guard import text_tokens as as_text
from mlx_server.request_threads import in_thread, in_thread_if_large
from mlx_server.requests import GenerateRequest

OF_CHAT = (*("tools", "chat_template_kwargs"), *("add_generation_prompt", "continue_final_message"))
"""Fields that have an effect on `messages`, and none on a `prompt`."""


OF_CONTENT = ("add_special", "parse_special", "with_pieces")
"""Fields that have an effect on a `content` only."""


class TokenizeBody(WireModel):
    """It has a `prompt` or `messages`, which are vLLM's, or a `content`, which is llama.cpp's."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """The first model of models.yaml by default."""
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    """Whether the tokens that begin and end a text are added; by default they are not."""
    parse_special: bool | None = None
    """Whether names of special tokens in the text are those tokens; by default they are."""
    with_pieces: bool | None = None
    messages: Annotated[Items[MessageParam], Field(min_length=1), MENDED] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    """If false, the prompt ends with the final message."""
    continue_final_message: bool | None = None
    """If true, it ends within the last message, which an answer continues."""
    add_special_tokens: bool | None = None
    """Defaults to true for a `prompt` and to false for `messages`, whose template adds its own."""
    return_token_strs: bool | None = None

    def unused(self) -> Iterable[str]:
        of_chat = OF_CHAT if self.messages is None else ()
        of_content = OF_CONTENT if self.content is None else ("add_special_tokens",)
        for name in (*of_chat, *of_content):
            if getattr(self, name) is not None:
                yield name


class DetokenizeBody(WireModel):
    model: Annotated[str, Field(min_length=1)] | None = None
    tokens: Annotated[Ids, Field(max_length=limits.TOKENIZED)]


TEXTS = ("prompt", "content", "messages")


def check(body: TokenizeBody) -> None:
    """Raises BadRequest for fields that contradict each other."""
    texts = [name for name in TEXTS if getattr(body, name) is not None]
    if len(texts) != 1:
        raise BadRequest(
            "Send either a `prompt` (or `content`), which is tokenised as it is, or `messages`, "
            "which the chat template renders first.",
            param=texts[-1] if texts else TEXTS[0],
        )
    if body.chat_template is not None:
        raise BadRequest(
            "`chat_template` is not supported: the model's owner sets it in models.yaml.",
            param="chat_template",
        )


def chat_request(body: TokenizeBody, model: str) -> GenerateRequest:
    """The request for an answer to the messages, whose prompt may end before the answer begins."""
    chat = ChatBody(
        model=model,
        messages=body.messages or [],
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt or None,
    )
    request = to_request(chat)
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    begins = body.add_generation_prompt is not False or conversation.continue_final_message
    return replace(request, prompts=(replace(conversation, add_generation_prompt=begins),))


def pieces_of(prepared: PreparedModel, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens with their texts. Part of a character is a list of its bytes."""
    pieces: list[dict[str, Any]] = []
    for token in tokens:
        raw = prepared.checkpoint.tokenizer.bytes_of(token)
        try:
            pieces.append({"id": token, "piece": raw.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token, "piece": list(raw)})
    return pieces


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


TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

router = keyed_router()


@router.post(TOKENIZE, openapi_extra=documented(TOKENIZE, TokenizeBody))
async def tokenize(http: Request) -> Response:
    body = await read(http, TokenizeBody)
    check(body)
    prepared = await _prepared(http, body.model)
    request = await in_thread(chat_request, body, prepared.id) if body.messages else None
    answer = await in_thread(tokenized, prepared, body, request, model=prepared.id)
    unseen = dict.fromkeys(media_places(request.prompts if request else (), prepared.takes))
    return json_response(answer, ignored_header([*await in_thread_if_large(body.ignored), *unseen]))


def tokenized(
    prepared: PreparedModel, body: TokenizeBody, request: GenerateRequest | None
) -> dict[str, Any]:
    """request: for an answer to the messages, if the body has them."""
    special = body.add_special_tokens
    if body.content is not None:
        tokenise = literal_tokens if body.parse_special is False else text_tokens
        special = bool(body.add_special)
        tokens = tokenise(prepared, body.content, "content", add_special_tokens=special)
    elif body.prompt is not None:
        special = special is not False
        tokens = text_tokens(prepared, body.prompt, "prompt", add_special_tokens=special)
    else:
        assert request
        tokens = chat_tokens(prepared, request, add_special_tokens=bool(special))
    entry = prepared.checkpoint.tokenizer.entry
    with_pieces = body.content is not None and body.with_pieces
    return {
        "count": len(tokens),
        "max_model_len": prepared.context_length,
        "tokens": pieces_of(prepared, tokens) if with_pieces else tokens,
        "token_strs": [entry(t) or "" for t in tokens] if body.return_token_strs else None,
    }


@router.post(DETOKENIZE, openapi_extra=documented(DETOKENIZE, DetokenizeBody))
async def detokenize(http: Request) -> Response:
    body = await read(http, DetokenizeBody)
    prepared = await _prepared(http, body.model)
    text = await in_thread(text_of, prepared, body.tokens, model=prepared.id)
    return json_response({"prompt": text, "content": text}, ignored_header(body.ignored()))


async def _prepared(http: Request, model: str | None) -> PreparedModel:
    pool: Pool = http.app.state.pool
    name, _ = pool.models.split(await model_or_default(pool, model))
    return await pool.prepared(name)
