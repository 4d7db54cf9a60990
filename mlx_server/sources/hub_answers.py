"""Checks the hub's answers of which the hub client makes paths, and which it does not check itself.

A commit or a content called `../../x` would lead out of its cache.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx2

from mlx_server.errors import ModelUnusable

NAMES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
"""The headers of a file that become names in the cache."""

LISTINGS = "/api/models/"


@cache
def check_answers() -> None:
    """Makes the hub client's HTTP client check each answer, from now on."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def checking() -> httpx2.Client:
        client = default_client_factory()
        client.event_hooks = {**client.event_hooks, "response": [_check]}
        return client

    set_client_factory(checking)


def _check(response: httpx2.Response) -> None:
    for name in _names(response):
        if isinstance(name, str) and _leads_elsewhere(name):
            raise ModelUnusable(
                f"The hub names a commit or a file {name[:100]!r}, which leads out of the cache, "
                "so nothing is fetched. Check the hub that HF_ENDPOINT names."
            )


def _names(response: httpx2.Response) -> Iterator[Any]:
    """The commits and contents that an answer names, as far as it is well formed."""
    if response.request.method == "HEAD":
        yield from map(response.headers.get, NAMES)
    elif response.is_success and LISTINGS in response.request.url.path:
        response.read()
        found = response.json()
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, dict):
                yield each.get("sha")
                lfs = each.get("lfs")
                yield lfs.get("oid") if isinstance(lfs, dict) else None


def _leads_elsewhere(name: str) -> bool:
    plain = name.removeprefix("W/").strip('"')
    return "/" in plain or plain in ("", ".", "..")
