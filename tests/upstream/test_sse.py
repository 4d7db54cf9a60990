"""Events are the same wherever their bytes are cut, and no size is beyond bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.upstream.responses import SseReader


def read(chunks: list[bytes]) -> list[str]:
    reader = SseReader()
    found = [text for chunk in chunks for text in reader.feed(chunk)]
    return found + reader.finish()


BREAKS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.lists(
    st.one_of(
        st.just(""),
        st.just(": a comment"),
        st.just("event: message"),
        st.text(alphabet="aé🙂: {}", max_size=8).map("data: {}".format),
    ),
    max_size=12,
)


@given(LINES, BREAKS, st.lists(st.integers(0, 200), max_size=8))
def test_where_it_is_cut_changes_nothing(lines: list[str], end: str, cuts: list[int]) -> None:
    stream = "".join(line + end for line in lines).encode()
    at = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[begin:stop] for begin, stop in pairwise(at)]
    assert read(chunks) == read([stream]) == read([bytes([byte]) for byte in stream])


def test_what_the_fields_say() -> None:
    stream = b"id: 1\nevent: x\ndata:{\ndata: }\n\n: ping\n\ndata: [DONE]"
    assert read([stream]) == ["{\n}", "[DONE]"]


def test_text_that_is_no_utf_8() -> None:
    with pytest.raises(UpstreamFailed, match="not UTF-8"):
        read([b"data: \xff\n\n"])


@pytest.mark.parametrize("sent", [b"x", b"data: x\n"], ids=["a line", "an event of many lines"])
def test_an_event_without_an_end(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_LINE_BYTES", 1000)
    with pytest.raises(UpstreamFailed, match="too long"):
        read([sent] * (limits.UPSTREAM_LINE_BYTES + 2))
