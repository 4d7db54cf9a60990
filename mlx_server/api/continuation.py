"""The wish to have the last message continued, on the wire, as vLLM names it."""

from mlx_server.api.fields import WireModel
from mlx_server.errors import BadRequest


class ContinuationBody(WireModel):
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def continues(self) -> bool:
        """Whether the answer continues the last message. Raises BadRequest for a contradiction."""
        begins, continues = self.add_generation_prompt, self.continue_final_message
        if begins and continues:
            raise BadRequest(
                "`continue_final_message: true` continues the last message, and "
                "`add_generation_prompt: true` begins a new one: send only one of them.",
                param="add_generation_prompt",
            )
        if begins is False and continues is False:
            raise BadRequest(
                "`add_generation_prompt: false` needs `continue_final_message: true`: an answer "
                "either begins a message or continues one.",
                param="continue_final_message",
            )
        return bool(continues) or begins is False
