"""A prompt that exceeds the context, whose tokens are counted once the error is reported."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from mlx_server.errors import ContextTooLong
from mlx_server.generation.plan import count_prompt
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.text_size import characters_of
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

COUNTED_CHARACTERS = 2 << 20
"""Longer texts are not tokenised only to be refused: it takes twenty times their memory."""


class PromptOverflow(ContextTooLong):
    """Planning stops early at a long prompt, and does not know how long it is. The exact number
    takes time, and a request that is shortened and tried again does without it."""

    def __init__(
        self, error: ContextTooLong, prepared: PreparedModel, request: GenerateRequest
    ) -> None:
        super().__init__(error.message, param=error.param)
        self.request = request
        self._prepared = prepared

    @property
    def context(self) -> int:
        return self._prepared.context_length

    async def tokens(self) -> int:
        """The tokens of the longest prompt. Of a text that is too long to be tokenised, the fewest
        that there can be."""
        return await in_thread(self._longest, model=self._prepared.id)

    def _longest(self) -> int:
        prompts = self.request.prompts
        return max(self._count(replace(self.request, prompts=(prompt,))) for prompt in prompts)

    def _count(self, request: GenerateRequest) -> int:
        characters = characters_of(request)
        if characters <= COUNTED_CHARACTERS:
            with suppress(ContextTooLong):
                return count_prompt(self._prepared, request)
        return max(self.context, characters // self._prepared.checkpoint.tokenizer.longest)


OverflowWords = Callable[[PromptOverflow, int], ContextTooLong]
"""The error in the words of one API, from the overflow and its number of tokens."""
