"""The effort that messages of the role `system` set, in place of the body's."""

from collections.abc import Iterable

from mlx_server.api.messages.protocol import AnthropicMessageParam


def effort_of(messages: Iterable[AnthropicMessageParam]) -> str | None:
    """The one that is in effect for the answer.

    A message that directly follows new input of the user sets the effort of the answer to that
    input, and any other from the next input on. Results of tools are not new input.
    """
    current = coming = None
    follows_input = False
    for message in messages:
        if message.speaker != "system":
            follows_input = message.speaker == "user" and not only_has_results(message)
            current = coming if follows_input else current
        elif message.output_config and message.output_config.effort:
            coming = message.output_config.effort
            current = coming if follows_input else current
    return current


def only_has_results(message: AnthropicMessageParam) -> bool:
    content = message.content
    return isinstance(content, list) and all(block.type == "tool_result" for block in content)
