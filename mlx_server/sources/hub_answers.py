"""The hub client's HTTP client: it checks the answers of which the hub client makes paths, and
bounds those that the hub client reads whole.

A commit or a content called `../../x` would lead out of its cache. A list of files may go on, page
after page, without end.
"""

import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx2

from mlx_server import limits
from mlx_server.errors import ModelUnusable

NAMES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
"""The headers of a file that become names in the cache."""


PAUSES = ("Retry-After", "RateLimit")
"""The headers for which the hub client would wait as long as they say, before it tries again. It
waits some seconds where there is none, and gives up after a few tries."""


class _Read(threading.local):
    nbytes = 0
    """Of the answers that this thread has read whole since `check_answers`."""


_read = _Read()


def check_answers() -> None:
    """Makes the hub client's HTTP client check each answer, from now on, and counts anew the bytes
    of those to this thread's requests."""
    _read.nbytes = 0
    _use_client()


@cache
def _use_client() -> None:
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import hf_request_event_hook

    hooks: dict[str, list[Callable[..., Any]]] = {
        "request": [hf_request_event_hook],
        "response": [_check_headers],
    }
    # as the hub client itself makes it; redirected requests go through the hooks too
    set_client_factory(lambda: _HubClient(event_hooks=hooks, follow_redirects=True, timeout=None))


class _HubClient(httpx2.Client):
    def send(
        self, request: httpx2.Request, *, stream: bool = False, **options: Any
    ) -> httpx2.Response:
        """Files are streamed, and counted by their reader. All else is read whole."""
        response = super().send(request, stream=True, **options)
        if stream and not response.is_error:
            return response
        try:
            response = _whole(response)
        finally:
            response.close()
        for name in _listed(response):
            _check(name)
        return response


def _whole(response: httpx2.Response) -> httpx2.Response:
    body, most = bytearray(), limits.HUB_LIST_BYTES
    for piece in response.iter_bytes():
        body += piece
        _read.nbytes += len(piece)
        if _read.nbytes > most:
            raise ModelUnusable(
                f"The hub says more than {most >> 20} MiB about one repository, so nothing is "
                "fetched. Check the hub that HF_ENDPOINT names."
            )
    headers = response.headers.copy()
    headers.pop("Content-Encoding", None)  # it is decoded
    for name in PAUSES:
        if _asks_for_too_long(headers.get(name, "")):
            headers.pop(name, None)
    return httpx2.Response(
        response.status_code,
        headers=headers,
        content=bytes(body),
        request=response.request,
        extensions=response.extensions,
        history=response.history,
    )


def _asks_for_too_long(pause: str) -> bool:
    numbers = [int(number[:9]) for number in re.findall(r"\d+", pause.rpartition("t=")[2])]
    return not numbers or max(numbers) > limits.HUB_PAUSE_SECONDS


def _check_headers(response: httpx2.Response) -> None:
    if response.request.method == "HEAD":
        for name in NAMES:
            _check(response.headers.get(name))


def _listed(response: httpx2.Response) -> Iterator[Any]:
    """The commits and contents that an answer names, as far as it is well formed."""
    try:
        answer = response.json()
    except ValueError:
        return
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict):
            yield each.get("sha")
            lfs = each.get("lfs")
            yield lfs.get("oid") if isinstance(lfs, dict) else None


def _check(name: Any) -> None:
    if isinstance(name, str) and _leads_elsewhere(name):
        raise ModelUnusable(
            f"The hub names a commit or a file {name[:100]!r}, which leads out of the cache, "
            "so nothing is fetched. Check the hub that HF_ENDPOINT names."
        )


def _leads_elsewhere(name: str) -> bool:
    plain = name.removeprefix("W/").strip('"')
    return "/" in plain or plain in ("", ".", "..")
