"""Reports of ranks arrive as they were sent; a broken one is refused."""

from typing import Any, get_args

import msgspec
import pytest

from mlx_server.worker.ranks import tape
from mlx_server.worker.ranks.tape import RankReport, decode_report, encode_report
from tests.structs import broken, filled, tagged

REPORTS = get_args(RankReport)


def test_every_report_can_be_decoded() -> None:
    assert tagged(tape) == set(REPORTS)


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_arrives_as_it_was_sent(report: Any) -> None:
    sent = filled(report)
    arrived = decode_report(encode_report(sent))
    assert type(arrived) is report
    assert arrived == sent


@pytest.mark.parametrize("report", REPORTS)
def test_a_broken_report_is_refused(report: Any) -> None:
    payload = encode_report(filled(report))
    for end in range(len(payload)):
        with pytest.raises(msgspec.DecodeError):
            decode_report(payload[:end])
    for sent in broken(filled(report)):
        with pytest.raises(msgspec.ValidationError):
            decode_report(encode_report(sent))


def test_a_rank_without_metal_recommends_nothing() -> None:
    sent = tape.RankReady(None)
    assert decode_report(encode_report(sent)) == sent


@pytest.mark.parametrize("sent", [{"type": "Ready"}, {"steps": 1, "value": 2}, [], None])
def test_what_is_no_report_of_a_rank_is_refused(sent: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_report(encode_report(sent))
