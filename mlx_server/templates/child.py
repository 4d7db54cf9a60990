"""Renders chat templates: the program of the child process. `child.py MEMORY_BYTES` serves requests
that come over the socket at its stdin, one at a time, until that is closed.

It imports jinja2 and msgspec only. The operating system holds it to its limits, whatever a template
does: timers that end the process, a bound on its memory, and no file, socket or process more than
it has. Its reply to a request that can't be met says why, and the next one is served as usual;
where memory ran out it ends after the reply, so that the next child has a clean heap.
"""

import gc
import json
import resource
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.runtime
import msgspec
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_server import limits

LENGTH_BYTES = 4
WINDOW = 1 << 16
"""Characters that are encoded at once: a template may write its whole prompt as one part."""

BIG_NUMBER = 1
"""The code under which msgpack carries a whole number of more than 64 bits."""


class Compile(msgspec.Struct, array_like=True, tag=True):
    digest: bytes
    source: str
    seconds: float
    """Of processor time; four times as much of the clock."""


class Render(msgspec.Struct, array_like=True, tag=True):
    digest: bytes
    variables: dict[str, Any]
    seconds: float
    max_characters: int


class Compiled(msgspec.Struct, array_like=True, tag=True):
    reads: list[str]
    """The variables that the template looks up."""


class Rendered(msgspec.Struct, array_like=True, tag=True):
    size: int
    """Bytes of the text in UTF-8, which comes behind this reply."""


class Refused(msgspec.Struct, array_like=True, tag=True):
    message: str


class Unknown(msgspec.Struct, array_like=True, tag=True):
    """The template has to be compiled first."""


class OutOfMemory(msgspec.Struct, array_like=True, tag=True):
    """The child ends after this reply."""


class TooLong(msgspec.Struct, array_like=True, tag=True):
    """The text has more characters than it may have."""


Request = Compile | Render
Reply = Compiled | Rendered | Refused | Unknown | OutOfMemory | TooLong


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    """What templates are written against: the environment of Hugging Face's transformers."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
        # nothing is computed when a template is compiled
        optimized=False,
        finalize=_as_it_is,
    )
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    """What needs the context is not computed before there is one."""
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
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Templates:
    def __init__(self) -> None:
        self._environment = environment()
        self._compiled: OrderedDict[bytes, jinja2.Template] = OrderedDict()

    def reply_to(self, request: Request) -> tuple[Reply, bytes | bytearray]:
        """And the text that comes behind it."""
        try:
            with time_limit(request.seconds):
                if isinstance(request, Compile):
                    return self._compile(request), b""
                found = self._render(request)
        except MemoryError:
            return OutOfMemory(), b""
        except Exception as error:  # a template is a program: it can fail in any way
            return Refused(str(error)[: limits.TEMPLATE_ERROR_CHARACTERS.value]), b""
        return (Rendered(len(found)), found) if isinstance(found, bytearray) else (found, b"")

    def _compile(self, asked: Compile) -> Compiled:
        template = self._environment.from_string(asked.source)
        reader = jinja2.meta.TrackingCodeGenerator(self._environment)
        reader.optimizer = None  # as in `find_undeclared_variables`, which computes constants
        reader.visit(self._environment.parse(asked.source))
        self._compiled[asked.digest] = template
        if len(self._compiled) > limits.COMPILED_TEMPLATES.value:
            self._compiled.popitem(last=False)
        return Compiled(sorted(reader.undeclared_identifiers))

    def _render(self, asked: Render) -> bytearray | Unknown | TooLong:
        if asked.digest not in self._compiled:
            return Unknown()
        self._compiled.move_to_end(asked.digest)
        text, left = bytearray(), asked.max_characters
        for part in self._compiled[asked.digest].generate(asked.variables):
            left -= len(part)
            if left < 0:
                return TooLong()
            for begin in range(0, len(part), WINDOW):
                text += part[begin : begin + WINDOW].encode()
        return text


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """The kernel ends the process beyond it: no template can hold that up, and no parent that has
    ended or is stopped is needed for it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 4 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(channel: socket.socket) -> None:
    templates = Templates()
    decoder = msgspec.msgpack.Decoder(Request, ext_hook=unpack_number)
    while (frame := _received(channel)) is not None:
        request = decoder.decode(frame)
        del frame
        reply, text = templates.reply_to(request)
        del request
        packed = msgspec.msgpack.encode(reply)
        channel.sendall(len(packed).to_bytes(LENGTH_BYTES) + packed)
        channel.sendall(text)
        if isinstance(reply, OutOfMemory):
            return
        del text


def unpack_number(code: int, data: memoryview) -> int:
    assert code == BIG_NUMBER
    return int.from_bytes(data, signed=True)


def _received(channel: socket.socket) -> bytearray | None:
    """None when the server has gone."""
    head = _exactly(channel, LENGTH_BYTES)
    return _exactly(channel, int.from_bytes(head)) if head else None


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    found, at = bytearray(size), 0
    while at < size:
        read = channel.recv_into(memoryview(found)[at:])
        if not read:
            return None
        at += read
    return found


def confine(memory: int) -> None:
    """For good: what is imported or opened later is refused."""
    for number in (signal.SIGHUP, signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if sys.platform == "linux":  # macOS has it, and refuses it: there the server watches
        _lower(resource.RLIMIT_AS, memory + _address_space())
    _lower(resource.RLIMIT_NOFILE, 3)  # stdin, stdout and stderr


def _lower(kind: int, size: int) -> None:
    """A hard limit that is lower already stays: it can't be raised."""
    _, hard = resource.getrlimit(kind)
    lowest = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(kind, (lowest, lowest))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _warm_up() -> None:
    """All that jinja2 imports late, which is too late once no file can be opened."""
    time.tzset()
    for source in (
        "{{ strftime_now('%c') }}{{ [1] | random }}{{ {} | tojson }}{{ lipsum() | pprint }}",
        "{{ 1 / 0 }}",
        "{{ 'http://a' | urlize | wordwrap(9) | striptags | filesizeformat }}",
        "{{ '%s' | format(1) }}{{ 'a' | urlencode }}{{ [1, 2] | groupby(0) }}",
    ):
        templates = Templates()
        templates.reply_to(Compile(b"", source, 0))
        templates.reply_to(Render(b"", {}, 0, 1 << 16))
    gc.collect()
    gc.freeze()


def main() -> None:
    _warm_up()
    confine(int(sys.argv[1]))
    serve(socket.socket(fileno=0))


if __name__ == "__main__":
    main()
