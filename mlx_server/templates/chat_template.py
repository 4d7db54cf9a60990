"""A checkpoint's Jinja chat template, rendered in a process with limits."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_server import limits
from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.sandbox.parent import Stopped
from mlx_server.templates.process import PROCESSES, TemplateRefused

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that rendering sets; `chat_template_kwargs` of a request can't set them."""

ANOTHER = "Set another one with `chat_template:` in models.yaml."


class TemplateLimitExceeded(BadRequest):
    """The template exceeded a limit; the same conversation in another form would too."""


class RefusedByTemplate(BadRequest):
    """The template raised an error; it may accept the same conversation in another form."""


class ChatTemplate:
    def __init__(self, source: str) -> None:
        if len(source) > limits.TEMPLATE_SOURCE:
            most = limits.TEMPLATE_SOURCE
            raise ModelUnusable(f"The chat template has more than {most} characters. {ANOTHER}")
        try:
            self.reads = frozenset(PROCESSES.compile(source))
        except (TemplateRefused, Stopped, UnicodeEncodeError) as error:
            raise ModelUnusable(
                f"The chat template can't be compiled: {error}. {ANOTHER}"
            ) from None
        self.source = source

    def takes(self, name: str) -> bool:
        """Whether a request may set this variable: the template must read it."""
        return name in self.reads and name not in RESERVED

    def render(self, variables: Mapping[str, Any]) -> str:
        return self.render_made(lambda: variables)

    def render_made(self, make: Callable[[], Mapping[str, Any]]) -> str:
        """Renders with variables that are made when they are sent, and not kept."""
        try:
            return PROCESSES.render_made(self.source, make)
        except Stopped as error:
            raise TemplateLimitExceeded(
                f"The model's chat template {error} for these messages, so it was stopped. "
                "Shorten them, or set another `chat_template:` in models.yaml.",
                param="messages",
            ) from None
        except (TemplateRefused, UnicodeEncodeError) as error:
            raise RefusedByTemplate(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
