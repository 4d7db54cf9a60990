"""What models.yaml and the checkpoint's files set for a request that leaves it open."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlx_server.messages import Conversation
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingChoices, SamplingParams

NOTHING: SamplingChoices = {}


def sampling(
    spec: ModelSpec,
    request: GenerateRequest,
    published: SamplingChoices = NOTHING,
    choice: int = 0,
) -> SamplingParams:
    """The sampling parameters of one answer, each from the first that sets it: the request,
    models.yaml, the checkpoint, the default.

    published: those of the checkpoint. choice: the number of the answer among the `n`.
    """
    return SamplingParams(
        **sampling_choices(spec, request, published),
        logit_bias=request.logit_bias,
        # each of the n answers needs another seed, or they would all be the same
        seed=None if request.seed is None else request.seed + choice,
        logprobs=request.logprobs,
    )


def sampling_choices(
    spec: ModelSpec, request: GenerateRequest, published: SamplingChoices = NOTHING
) -> SamplingChoices:
    return {**published, **spec.choices, **request.choices}


def token_limit(spec: ModelSpec, request: GenerateRequest) -> int | None:
    return spec.max_tokens if request.max_tokens is None else request.max_tokens


def template_kwargs(spec: ModelSpec, conversation: Conversation) -> Mapping[str, Any]:
    return {**spec.template_kwargs, **conversation.template_kwargs}


def completed(spec: ModelSpec, conversation: Conversation) -> Conversation:
    """The conversation as it is rendered, here or by another server."""
    return replace(conversation, template_kwargs=template_kwargs(spec, conversation))
