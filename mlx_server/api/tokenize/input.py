"""Converts the body of `/tokenize`: a text, or a conversation as chat completions take it."""

from dataclasses import replace

from mlx_server.api.chat_completions.input import to_request
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.tokenize.protocol import TokenizeBody
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation
from mlx_server.requests import GenerateRequest

TEXTS = ("prompt", "content", "messages")


def check(body: TokenizeBody) -> None:
    """Raises BadRequest for fields that contradict each other."""
    given = [name for name in TEXTS if getattr(body, name) is not None]
    if len(given) != 1:
        raise BadRequest(
            "Send either a `prompt` (or `content`), which is tokenised as it is, or `messages`, "
            "which the chat template renders first.",
            param=given[-1] if given else TEXTS[0],
        )
    if body.chat_template is not None:
        raise BadRequest(
            "`chat_template` is not supported: the model's owner sets it in models.yaml.",
            param="chat_template",
        )


def chat_request(body: TokenizeBody, model: str) -> GenerateRequest:
    """The request for an answer to the messages, whose prompt may end before the answer begins."""
    chat = ChatBody(
        model=model,
        messages=body.messages or [],
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt or None,
    )
    request = to_request(chat)
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    begins = body.add_generation_prompt is not False or conversation.continue_final_message
    return replace(request, prompts=(replace(conversation, add_generation_prompt=begins),))
