"""Converts a completions body to a `GenerateRequest`."""

from mlx_server.api.completions.protocol import CompletionBody
from mlx_server.api.fields import check_stream_options
from mlx_server.errors import BadRequest
from mlx_server.requests import GenerateRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this endpoint."""


def to_request(body: CompletionBody) -> GenerateRequest:
    check_stream_options(body.stream, body.stream_options)
    body.refuse_streamed_prompts()
    n = body.n or 1
    if body.best_of not in (None, n):
        raise BadRequest(
            "`best_of` should equal `n`: ranking answers is not supported.", param="best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("`max_tokens: 0` needs `echo: true`.", param="max_tokens")
    return GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        include_raw=body.include_raw,
        **body.constrained(),
        buffered=not body.stream,
        progress=body.include_progress,
        continuous_usage=body.counts_tokens,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        prompts=_prompts(body.prompt),
        n=n,
        max_tokens=_most_tokens(body.max_tokens),
        logprobs=body.logprobs,
        echo=bool(body.echo),
        special_tokens=body.skip_special_tokens is False,
    )


def _most_tokens(given: int | None) -> int | None:
    if given is None:
        return DEFAULT_MAX_TOKENS
    return None if given < 0 else given


def _prompts(
    prompt: str | list[int] | list[str] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """A list of token ids is one prompt; any other list is several prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in prompt)
