"""What a hostile template takes of a server that has no other children."""

import resource
import time
from typing import NamedTuple
from unittest.mock import patch

from mlx_server import limits
from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.system.sandbox.chat_template import PROCESSES, ChatTemplate


class Taken(NamedTuple):
    children_seconds: float
    own_seconds: float
    largest_child: int


def attacked(source: str, seconds: float) -> Taken:
    """To be called in a process of its own, since the system counts the children of earlier tests
    too. Afterwards it renders another template."""
    with patch.object(limits, "TEMPLATE_SECONDS", seconds):
        began = time.thread_time()
        refusal(source)
        PROCESSES.close()  # the time of a child counts when it has ended
        own = time.thread_time() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    says_hello()
    return Taken(children.ru_utime + children.ru_stime, own, children.ru_maxrss * 1024)


def refusal(source: str) -> str:
    try:
        return ChatTemplate(source).render({})[-100:]
    except (BadRequest, ModelUnusable) as error:
        return error.message


def says_hello() -> None:
    other = ChatTemplate("{{ messages[0].content }}")
    assert other.render({"messages": [{"content": "hello"}]}) == "hello"
