"""What the server of a test run keeps of its requests."""

from mlx_server import limits
from mlx_server.api.replay import RecordedRequests


def test_the_oldest_requests_are_dropped() -> None:
    recorded = RecordedRequests()
    piece = bytes(limits.RECORDED_REQUEST_BYTES // 4)
    for number in range(5):
        recorded.add(f"/{number}", piece)
    assert [each["path"] for each in recorded.shown()] == ["/1", "/2", "/3", "/4"]
    recorded.add("/5", b"")
    recorded.clear()
    assert recorded.shown() == []
    recorded.add("/6", b"\xff")
    assert recorded.shown() == [{"path": "/6", "body": "\ufffd"}]
