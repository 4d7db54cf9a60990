from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server.api.body import documented, read
from mlx_server.api.fields import ignored_header
from mlx_server.api.handlers import json_response
from mlx_server.api.tokenize.input import chat_request, check
from mlx_server.api.tokenize.output import tokenized
from mlx_server.api.tokenize.protocol import DetokenizeBody, TokenizeBody
from mlx_server.generation.tokenization import chat_tokens, text_of, text_tokens
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.request_threads import in_thread

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

router = APIRouter()


@router.post(TOKENIZE, openapi_extra=documented(TOKENIZE, TokenizeBody))
async def tokenize(http: Request) -> Response:
    body = await read(http, TokenizeBody)
    check(body)
    prepared = await _prepared(http, body.model)
    made = await in_thread(_tokenized, prepared, body, model=prepared.id)
    return json_response(made, ignored_header(await in_thread(body.ignored)))


def _tokenized(prepared: PreparedModel, body: TokenizeBody) -> dict[str, Any]:
    if body.prompt is None:
        special = bool(body.add_special_tokens)
        tokens = chat_tokens(prepared, chat_request(body), add_special_tokens=special)
    else:
        special = body.add_special_tokens is not False
        tokens = text_tokens(prepared, body.prompt, add_special_tokens=special)
    return tokenized(prepared, tokens, with_texts=bool(body.return_token_strs))


@router.post(DETOKENIZE, openapi_extra=documented(DETOKENIZE, DetokenizeBody))
async def detokenize(http: Request) -> Response:
    body = await read(http, DetokenizeBody)
    prepared = await _prepared(http, body.model)
    text = await in_thread(text_of, prepared, body.tokens, model=prepared.id)
    return json_response({"prompt": text}, ignored_header(body.ignored()))


async def _prepared(http: Request, model: str) -> PreparedModel:
    pool: Pool = http.app.state.pool
    name, _ = pool.named(model)
    return await pool.prepared(name)
