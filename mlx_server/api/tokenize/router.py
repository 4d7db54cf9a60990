from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.default_model import model_or_default
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.api.tokenize.input import chat_request, check
from mlx_server.api.tokenize.output import tokenized, with_pieces
from mlx_server.api.tokenize.protocol import DetokenizeBody, TokenizeBody
from mlx_server.generation.tokenization import chat_tokens, literal_tokens, text_of, text_tokens
from mlx_server.messages import media_places
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

router = APIRouter()


@router.post(TOKENIZE, openapi_extra=documented(TOKENIZE, TokenizeBody))
async def tokenize(http: Request) -> Response:
    body = await read(http, TokenizeBody)
    check(body)
    prepared = await _prepared(http, body.model)
    request = await in_thread(chat_request, body, prepared.id) if body.messages else None
    made = await in_thread(_tokenized, prepared, body, request, model=prepared.id)
    unseen = dict.fromkeys(media_places(request.prompts if request else ()))
    return json_response(made, ignored_header([*await in_thread(body.ignored), *unseen]))


def _tokenized(
    prepared: PreparedModel, body: TokenizeBody, request: GenerateRequest | None
) -> dict[str, Any]:
    tokens = _tokens(prepared, body, request)
    made = tokenized(prepared, tokens, with_texts=bool(body.return_token_strs))
    if body.content is not None and body.with_pieces:
        made["tokens"] = with_pieces(prepared, tokens)
    return made


def _tokens(
    prepared: PreparedModel, body: TokenizeBody, request: GenerateRequest | None
) -> list[int]:
    if body.content is not None:
        tokenise = literal_tokens if body.parse_special is False else text_tokens
        special = bool(body.add_special)
        return tokenise(prepared, body.content, "content", add_special_tokens=special)
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return text_tokens(prepared, body.prompt, "prompt", add_special_tokens=special)
    special = bool(body.add_special_tokens)
    assert request
    return chat_tokens(prepared, request, add_special_tokens=special)


@router.post(DETOKENIZE, openapi_extra=documented(DETOKENIZE, DetokenizeBody))
async def detokenize(http: Request) -> Response:
    body = await read(http, DetokenizeBody)
    prepared = await _prepared(http, body.model)
    text = await in_thread(text_of, prepared, body.tokens, model=prepared.id)
    return json_response({"prompt": text, "content": text}, ignored_header(body.ignored()))


async def _prepared(http: Request, model: str | None) -> PreparedModel:
    pool: Pool = http.app.state.pool
    name, _ = pool.named(await model_or_default(pool, model))
    return await pool.prepared(name)
