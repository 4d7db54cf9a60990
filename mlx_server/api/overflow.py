"""Makes the error for a prompt that exceeds the context, in OpenAI's wording: clients recognise it,
and shorten the conversation."""

from mlx_server.errors import ContextTooLong
from mlx_server.generation.plan import PromptOverflow


def messages_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    return ContextTooLong(
        f"This model's maximum context length is {overflow.context} tokens. However, your messages "
        f"resulted in {tokens} tokens. Please reduce the length of the messages.",
        param="messages",
    )


def prompt_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    answer = overflow.request.max_tokens or 0
    return ContextTooLong(
        f"This model's maximum context length is {overflow.context} tokens, however you requested "
        f"{tokens + answer} tokens ({tokens} in your prompt; {answer} for the completion). Please "
        "reduce your prompt.",
        param="prompt",
    )


def input_too_long(overflow: PromptOverflow, tokens: int) -> ContextTooLong:
    return ContextTooLong(
        "Your input exceeds the context window of this model. Please adjust your input and try "
        f"again. This model's maximum context length is {overflow.context} tokens. However, your "
        f"input resulted in {tokens} tokens.",
        param="input",
    )
