"""Renders chat templates: the program of a warm process, `child.py MEMORY_BYTES LIFELINE`.

It imports only jinja2 and msgspec. The operating system enforces its limits, whatever a template
does: timers end the process, its memory is bounded, and it can open no file, socket or process. If
a request fails, the reply has the reason and the next request is served as usual.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.runtime
import msgspec
from jinja2.nodes import Call, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_server import limits
from mlx_server.system.sandbox.child import run, time_limit
from mlx_server.system.sandbox.template_messages import BIG_NUMBER, RenderTemplate, TemplateReply

WINDOW = 1 << 16
"""Characters that are encoded at a time: a template may yield its whole prompt as one part."""

CompiledTemplate = tuple[jinja2.Template, list[str], Collection[str]]
"""With the names of the variables that it reads, and of those that it calls."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks text to train on; in a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    """The environment of Hugging Face's transformers, which templates are written for."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
        # no constants are evaluated when a template is compiled
        optimized=False,
        finalize=_as_it_is,
    )
    sandbox.filters["tojson"] = _tojson
    # Jinja's own makes a text of HTML, next to which other text is escaped: quotes become `&#34;`
    sandbox.filters["safe"] = str
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    """Return the value. It takes the context so that Jinja evaluates nothing without one."""
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Templates:
    def __init__(self) -> None:
        self._environment = environment()
        self._compiled: OrderedDict[str, CompiledTemplate] = OrderedDict()
        """By source."""

    def reply_to(self, request: RenderTemplate) -> tuple[TemplateReply, bytes | bytearray]:
        """The reply and its payload."""
        called: Collection[str] = ()
        try:
            with time_limit(request.seconds):
                template, reads, called = self._template(request.source)
            if request.variables is None:
                return TemplateReply(reads), b""
            with time_limit(request.seconds):
                text = _rendered(template, request.variables, request.max_characters)
        except MemoryError:
            return TemplateReply(exceeds="memory"), b""
        except Exception as error:  # a template is a program and can raise anything
            # an OSError's text would have a path of this machine
            message = str(getattr(error, "strerror", None) or error)[: limits.ERROR_CHARACTERS]
            return TemplateReply(refusal=message, is_broken=_is_broken(error, called)), b""
        return (
            (TemplateReply(exceeds="characters"), b"") if text is None else (TemplateReply(), text)
        )

    def _template(self, source: str) -> CompiledTemplate:
        if source not in self._compiled:
            template = self._environment.from_string(source)
            reader = jinja2.meta.TrackingCodeGenerator(self._environment)
            reader.optimizer = None  # `find_undeclared_variables` would evaluate constants
            tree = self._environment.parse(source)
            reader.visit(tree)
            calls = (call.node for call in tree.find_all(Call))
            called = {it.name for it in calls if isinstance(it, Name)}
            self._compiled[source] = template, sorted(reader.undeclared_identifiers), called
            if len(self._compiled) > limits.COMPILED_TEMPLATES:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return self._compiled[source]


def _rendered(
    template: jinja2.Template, variables: Mapping[str, Any], max_characters: int
) -> bytearray | None:
    """Returns None if the text is too long."""
    text, left = bytearray(), max_characters
    for part in template.generate(variables):
        left -= len(part)
        if left < 0:
            return None
        for begin in range(0, len(part), WINDOW):
            text += part[begin : begin + WINDOW].encode()
    return text


def _is_broken(error: Exception, called: Collection[str]) -> bool:
    """Whether the template calls a function or names a filter or a test that does not exist."""
    if isinstance(error, jinja2.UndefinedError):
        return str(error) in {f"{name!r} is undefined" for name in called}
    return isinstance(error, jinja2.TemplateRuntimeError) and str(error).startswith("No ")


def unpack_number(code: int, data: memoryview) -> int:
    assert code == BIG_NUMBER
    return int.from_bytes(data, signed=True)


def _warm_up() -> None:
    """Trigger jinja2's late imports, which would fail once no file can be opened."""
    time.tzset()
    for source in (
        "{{ strftime_now('%c') }}{{ [1] | random }}{{ {} | tojson }}{{ lipsum() | pprint }}",
        "{{ 1 / 0 }}",
        "{{ 'http://a' | urlize | wordwrap(9) | striptags | filesizeformat }}",
        "{{ '%s' | format(1) }}{{ 'a' | urlencode }}{{ [1, 2] | groupby(0) }}",
    ):
        Templates().reply_to(RenderTemplate(source, {}, 0, 1 << 16))


def main() -> None:
    templates = Templates()
    decoder = msgspec.msgpack.Decoder(RenderTemplate, ext_hook=unpack_number)

    def answer(frame: bytearray) -> tuple[TemplateReply, bytes | bytearray]:
        request = decoder.decode(frame)
        frame.clear()  # of a large request each copy counts
        return templates.reply_to(request)

    run(_warm_up, answer)


if __name__ == "__main__":
    main()
