"""The error for a prompt that exceeds the context. Its tokens are counted only if an API reports
their number."""

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
"""The characters above which a prompt is not tokenised for the error message alone, since that
takes twenty times the text's memory."""


class PromptOverflow(ContextTooLong):
    """A prompt is too long. Planning stops early and does not know its length, which takes time to
    count and is not needed where the request is shortened and tried again."""

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
        """The tokens of the longest prompt, or a lower bound if it is too long to be tokenised."""
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


MakeOverflowError = Callable[[PromptOverflow, int], ContextTooLong]
"""Makes the error as one API words it, from the overflow and the prompt's number of tokens."""
