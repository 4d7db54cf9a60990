"""Removes lines that some clients change in every request and that mean nothing to a model. They
would keep prompts out of the prompt cache."""

from dataclasses import replace

from mlx_server.messages import Conversation
from mlx_server.pool.prepare import ModelSpec
from mlx_server.prompts import volatile_lines
from mlx_server.requests import GenerateRequest, Prompt


def without_volatile_lines(
    spec: ModelSpec, request: GenerateRequest
) -> tuple[GenerateRequest, tuple[str, ...]]:
    """The request without volatile lines, and the names of those that were removed."""
    if spec.volatile_lines == "keep":
        return request, ()
    cleaned = [_cleaned(prompt) for prompt in request.prompts]
    names = dict.fromkeys(name for _, found in cleaned for name in found)
    return replace(request, prompts=tuple(prompt for prompt, _ in cleaned)), tuple(names)


def _cleaned(prompt: Prompt) -> tuple[Prompt, tuple[str, ...]]:
    if isinstance(prompt, Conversation):
        return volatile_lines.without_volatile_lines(prompt)
    return prompt, ()
