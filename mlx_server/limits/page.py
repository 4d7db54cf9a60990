"""Limits on what the page's data takes."""

from mlx_server.limits.limit import Limit

PAGE_STREAMS = Limit(
    "open streams of the page's data", 8, "items", "client", beyond="503 for a further one"
)
LISTED_ANSWERS = Limit(
    "ended requests that the page lists", 200, "items", "server", beyond="the oldest is dropped"
)
LISTED_TEXT = Limit(
    "text of a prompt or an answer that the page lists",
    4000,
    "characters",
    "request",
    beyond="the rest is left out",
)
SAMPLES = Limit(
    "samples of 15 seconds for the page's charts, six hours of them",
    1440,
    "items",
    "server",
    beyond="the oldest is dropped",
)
