"""JSON that is none: half characters, and numbers that are no numbers."""

from starlette.testclient import TestClient

from tests.upstream.playing import AnswerReader, PlayingServer
from tests.upstream.quirks import Quirk, check, reads

QUIRKS = (
    Quirk("half an emoji", ({"content": "\ud83d"}, {"content": "Yes"}), text="\ufffdYes"),
    Quirk(
        "what is no number",
        ({"choices": [{"delta": {"content": "Yes"}, "logprobs": float("nan")}]},),
        text="Yes",
    ),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)
