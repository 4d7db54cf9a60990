"""Results of tools answer the calls before them."""

import pytest

from mlx_server.api.ollama import OllamaChatBody, chat_request
from mlx_server.messages import Conversation


@pytest.mark.slow
@pytest.mark.parametrize("names", [("f",), ("f", "g")])
def test_thousands_of_results_find_their_calls(names: tuple[str, ...]) -> None:
    """Without looking through all calls for each result, which would take minutes."""
    many = 20_000
    calls = [{"function": {"name": names[n % len(names)]}} for n in range(many)]
    turns = [{"role": "tool", "tool_name": names[-1]} for _ in range(many)]
    turns += [{"role": "tool"}] * many
    messages = [{"role": "assistant", "tool_calls": calls}, *turns]
    body = OllamaChatBody.model_validate({"model": "m", "messages": messages})
    (conversation,) = chat_request(body, "m").prompts
    assert isinstance(conversation, Conversation)
    ids = [message.tool_call_id for message in conversation.messages[1:]]
    named = [f"call_0_{n}" for n in range(len(names) - 1, many, len(names))]
    others = [f"call_0_{n}" for n in range(0, many, 2)] if len(names) > 1 else []
    assert ids == [*named, *[None] * (many - len(named)), *others, *[None] * (many - len(others))]
