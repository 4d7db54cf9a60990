"""Refuses message framing that h11 accepts but a proxy might read differently.

If two servers disagree on where a request ends, a second request can be smuggled in its body.
"""

import re

import h11

from mlx_server import limits

BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)")
HEAD_END = re.compile(rb"\n\r?\n")
FOLDED_LINE = re.compile(rb"\n[ \t]")

SMALL_BYTES = 256
"""Chunks smaller than this are counted and limited: each costs the event loop time."""

Received = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


class StrictConnection(h11.Connection):
    wrong = "The request is not valid HTTP."
    """Message for the client about the last refused event."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, limits.HEAD_BYTES)
        self._small_chunks = 0

    def next_event(self) -> Received:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        self._refuse_if(_wrong_with_size(before))
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._small_chunks = 0
            after = self.trailing_data[0]
            self._refuse_if(_framing_error(event, before[: len(before) - len(after)], after))
        elif isinstance(event, h11.Data) and _is_small_chunk(event):
            self._small_chunks += 1
            if self._small_chunks > limits.SMALL_CHUNKS:
                self._refuse_if(
                    f"The body has too many small chunks: send {SMALL_BYTES} bytes or more in each."
                )
        elif isinstance(event, h11.EndOfMessage):
            self._refuse_if(_too_many(len(event.headers)))
        return event

    def _refuse_if(self, wrong: str | None) -> None:
        if wrong:
            self.wrong = wrong
            raise h11.RemoteProtocolError(wrong)


def _is_small_chunk(data: h11.Data) -> bool:
    return data.chunk_start and data.chunk_end and len(data.data) < SMALL_BYTES


def _wrong_with_size(received: bytes) -> str | None:
    """Checks the head in `received`, which may be incomplete, before the costly parsing. h11 itself
    accepts a head of any length if it arrives at once."""
    end = HEAD_END.search(received)
    head = received[: end.start()] if end else received
    if len(head) > limits.HEAD_BYTES:
        return f"The request head is larger than {limits.HEAD_BYTES} bytes."
    return _too_many(head.count(b"\n"))


def _too_many(lines: int) -> str | None:
    if lines > limits.HEADERS:
        return f"The request has more than {limits.HEADERS} header lines."
    return None


def _framing_error(request: h11.Request, head: bytes, after: bytes) -> str | None:
    headers = dict(request.headers)
    if BARE_LINE_END.search(head):
        return "Each line of a request's head must end with CR LF."
    if FOLDED_LINE.search(head):
        return "A header must not be continued on a second line."
    if not request.http_version.startswith(b"1."):
        return "This server only supports HTTP/1.1 and 1.0."
    if b"transfer-encoding" in headers:
        if b"content-length" in headers:
            return "A request must not have both Content-Length and Transfer-Encoding."
        if request.http_version < b"1.1":
            return "HTTP/1.0 has no Transfer-Encoding."
    upgrade = upgrade_of(request.headers)
    # Java's client and curl offer HTTP/2 with each request; the offer is ignored, body or not
    is_http2_offer = upgrade == b"h2c" and b"http2-settings" in headers
    if upgrade and _has_body(headers, after) and not is_http2_offer:
        return "A request with Upgrade must not have a body."
    return None


def upgrade_of(headers: h11._headers.Headers | list[tuple[bytes, bytes]]) -> bytes | None:
    """The protocols of an Upgrade header, in lower case; None without an upgrade."""
    options = [
        option.strip().lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    ]
    wanted = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    return b", ".join(wanted) if wanted and b"upgrade" in options else None


def _has_body(headers: dict[bytes, bytes], after: bytes) -> bool:
    """Whether there is a body, or bytes `after` the head, which a client that asks for an upgrade
    must not send before the answer."""
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or length != b"0" or bool(after)
