"""Images and other media in a request to a model that reads only text."""

from collections.abc import Callable, Iterator
from itertools import takewhile

from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Media
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, Prompt


def check_media(
    spec: ModelSpec, request: GenerateRequest, takes: Callable[[Media], bool] = lambda _: False
) -> None:
    """Raise BadRequest for media that the model can't take in the newest question, if its owner
    wants that. Those of the history are never refused: the client sends them again with each
    turn."""
    if spec.images != "refuse":
        return
    for medium in (each for prompt in request.prompts for each in _in_question(prompt)):
        if not takes(medium):
            raise BadRequest(
                f"{spec.id} can't be sent this {medium.kind}: {medium.why}. Leave it out, or use "
                "another model.",
                param=medium.place,
            )


def _in_question(prompt: Prompt) -> Iterator[Media]:
    """The media of the user's messages at the end of a conversation."""
    messages = prompt.messages if isinstance(prompt, Conversation) else ()
    for message in takewhile(lambda message: message.role == "user", reversed(messages)):
        yield from message.media
