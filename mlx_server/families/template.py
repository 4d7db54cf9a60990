"""Chat templates: the checkpoint's own Jinja, in a sandbox with limits."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.nodes import Node
from jinja2.parser import Parser

from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.families.sandbox import WORK, Sandbox, Work

MOST_CHARACTERS = 1 << 20

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Set by the rendering itself; a request can't set them through chat_template_kwargs."""


class ChatTemplate:
    def __init__(self, source: str) -> None:
        environment = _environment()
        if len(source) > MOST_CHARACTERS:
            raise ModelUnusable(f"The chat template has more than {MOST_CHARACTERS} characters.")
        try:
            self._template = environment.from_string(source)
            self.reads = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except Exception as error:  # Python's compiler has limits of its own
            raise ModelUnusable(
                f"The chat template can't be compiled: {error}. "
                "Set another one with `chat_template:` in models.yaml."
            ) from None
        self.source = source

    def takes(self, name: str) -> bool:
        """Whether a request may set this name: only what the template itself reads."""
        return name in self.reads and name not in RESERVED

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render({**variables, WORK: Work()})
        except BadRequest:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Sandbox:
    """What templates are written against: the environment of Hugging Face's transformers."""
    environment = Sandbox(
        filters={"tojson": _tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
