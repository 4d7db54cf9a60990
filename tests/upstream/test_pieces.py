"""Pieces of an answer whose choices have another form or number."""

from starlette.testclient import TestClient

from tests.upstream.playing import AnswerReader, Json, PlayingServer
from tests.upstream.quirks import Quirk, check, reads


def numbered(index: int, text: str, finish: str | None = None) -> Json:
    """An answer of several."""
    return {"index": index, "delta": {"content": text}, "finish_reason": finish}


QUIRKS = (
    Quirk(
        "an answer without a list",
        ({"choices": {"delta": {"content": "Yes"}}},),
        text="Yes",
    ),
    Quirk(
        "answers that were not asked for",
        (
            {"choices": [numbered(1, "No"), numbered(0, "Yes")]},
            {"choices": [numbered(1, "No", "length")]},
        ),
        text="Yes",
        unmet=("choices: the upstream sent several, this is the first",),
    ),
    Quirk(
        "a number that is not 0",
        ({"choices": [numbered(5, "Yes", "stop")]},),
        text="Yes",
        ends={"choices": []},
    ),
    Quirk("text as a completion has it", ({"choices": [{"text": "Yes"}]},), text="Yes"),
    Quirk(
        "pieces with nothing but a role",
        ({"role": "assistant"}, {"content": "Ye"}, {"role": "assistant"}, {"content": "s"}),
        text="Yes",
    ),
    Quirk(
        "a role that is not the assistant's",
        ({"role": "system", "content": "Yes"},),
        text="Yes",
    ),
    *(
        Quirk(f"an answer as {value}", (value,), text="Yes")
        for value in (
            {"choices": [{"delta": "Yes"}]},
            {"choices": [{"delta": [{"content": "Yes"}]}]},
            {"choices": ["Yes"]},
            {"choices": [None, {"delta": {"content": "Yes"}}]},
            {"choices": {"0": {"delta": {"content": "Yes"}}}},
        )
    ),
    Quirk("null choices", ({"choices": None}, {"content": "Yes"}), text="Yes"),
    Quirk("an empty choice", ({"choices": [None]}, {"content": "Yes"}), text="Yes"),
)


@reads(*QUIRKS)
def test_it_reads(
    quirk: Quirk, read_answer: AnswerReader, clients: dict[str, TestClient], upstream: PlayingServer
) -> None:
    check(quirk, read_answer, clients, upstream)
