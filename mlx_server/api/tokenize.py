"""`POST /tokenize` and `POST /detokenize` on the wire, as vLLM has them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.chat_completions.input import ChatBody, MessageParam, ToolParam, to_request
from mlx_server.api.completions import Ids
from mlx_server.api.fields import ContinuationBody, Items, SamplingBody, WireModel, ignored_header
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
from mlx_server.request_threads import in_thread, in_thread_if_large
from mlx_server.requests import GenerateRequest

OF_CHAT = (*("tools", "chat_template_kwargs"), *("add_generation_prompt", "continue_final_message"))
"""Fields that have an effect on `messages`, and none on a `prompt`."""


class TokenizeBody(ContinuationBody):
    """It has a `prompt` or `messages`."""

    UNSUPPORTED = SamplingBody.UNSUPPORTED

    model: Annotated[str, Field(min_length=1)] | None = None
    """The first model of models.yaml by default."""
    prompt: str | None = None
    messages: Annotated[Items[MessageParam], Field(min_length=1), MENDED] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Defaults to true for a `prompt` and to false for `messages`, whose template adds its own."""
    return_token_strs: bool | None = None

    def unused(self) -> Iterable[str]:
        for name in OF_CHAT if self.messages is None else ():
            if getattr(self, name) is not None:
                yield name


class DetokenizeBody(WireModel):
    model: Annotated[str, Field(min_length=1)] | None = None
    tokens: Annotated[Ids, Field(max_length=limits.TOKENIZED)]


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


def chat_tokens(
    prepared: PreparedModel, request: GenerateRequest, *, add_special_tokens: bool
) -> list[int]:
    """The tokens of the request's one conversation. Raises ContextTooLong.

    add_special_tokens: whether to add also those of a plain text, although a chat template has its
    own.
    """
    check_text(prepared, request)
    request, _ = without_volatile_lines(request)
    (conversation,) = with_continued_messages(prepared, request).prompts
    assert isinstance(conversation, Conversation)
    spec = replace(prepared.spec, context_length=limits.TOKENIZED)
    prompt = chat_prompt(replace(prepared, spec=spec), conversation)
    tokens = with_vocabulary(prompt, prepared.vision.token if prepared.vision else 0)
    tokenizer = prepared.checkpoint.tokenizer
    return tokenizer.with_special_tokens(tokens) if add_special_tokens else tokens


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


TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

router = keyed_router()


@router.post(TOKENIZE, openapi_extra=documented(TOKENIZE, TokenizeBody))
async def tokenize(http: Request) -> Response:
    body = await read(http, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest(
            "Send either a `prompt`, which is tokenised as it is, or `messages`, which the chat "
            "template renders first.",
            param="messages" if body.messages else "prompt",
        )
    ignored = await in_thread_if_large(body.ignored)
    prepared = await _prepared(http, body.model)
    request = await in_thread(chat_request, body, prepared.id) if body.messages else None
    answer = await in_thread(tokenized, prepared, body, request, model=prepared.id)
    unseen = dict.fromkeys(media_places(request.prompts if request else (), prepared.takes))
    return json_response(answer, ignored_header([*ignored, *unseen]))


def tokenized(
    prepared: PreparedModel, body: TokenizeBody, request: GenerateRequest | None
) -> dict[str, Any]:
    """request: for an answer to the messages, if the body has them. Raises BadRequest for a text
    with too many tokens."""
    tokenizer, most = prepared.checkpoint.tokenizer, limits.TOKENIZED
    special = not request if body.add_special_tokens is None else body.add_special_tokens
    with suppress(ContextTooLong):
        tokens = (
            chat_tokens(prepared, request, add_special_tokens=special)
            if request
            else tokenizer.encode_prompt(body.prompt or "", most, add_special_tokens=special)
        )
        if len(tokens) <= most:
            texts = (tokenizer.entry(token) or "" for token in tokens)
            return {
                "count": len(tokens),
                "max_model_len": prepared.context_length,
                "tokens": tokens,
                "token_strs": list(texts) if body.return_token_strs else None,
            }
    param = "messages" if request else "prompt"
    raise BadRequest(f"`{param}` should have no more than {most} tokens. Split it.", param=param)


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
