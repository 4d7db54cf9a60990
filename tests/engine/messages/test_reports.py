"""Reports arrive as they were sent; a frame that is broken is refused as a whole."""

from typing import Any, get_args

import msgspec
import pytest

from mlx_server.engine import messages
from mlx_server.engine.messages import Admitted, Command, Heartbeat, Report, RowFailed, Token
from tests.structs import broken, filled, tagged

REPORTS = get_args(Report)


def test_every_report_can_be_decoded_and_has_a_tag_of_its_own() -> None:
    assert tagged(messages) == {*REPORTS, *get_args(Command)}
    assert len({each.__struct_config__.tag for each in REPORTS}) == len(REPORTS)


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_arrives_as_it_was_sent(report: Any) -> None:
    sent = filled(report)
    (arrived,) = messages.decode_reports(messages.encode_reports([sent]))
    assert type(arrived) is report
    assert arrived == sent


@pytest.mark.parametrize("report", REPORTS)
def test_a_field_of_a_wrong_type_refuses_the_frame(report: Any) -> None:
    for sent in broken(filled(report)):
        with pytest.raises(msgspec.ValidationError):
            messages.decode_reports(messages.encode_reports([Admitted(1), sent]))


def test_the_reports_of_a_step_keep_their_order() -> None:
    sent = [filled(each) for each in REPORTS]
    assert messages.decode_reports(messages.encode_reports(sent)) == sent


def test_a_frame_that_was_cut_is_refused_wherever_it_ends() -> None:
    payload = messages.encode_reports([RowFailed(1, "no"), Admitted(2)])
    for end in range(len(payload)):
        with pytest.raises(msgspec.DecodeError):
            messages.decode_reports(payload[:end])


@pytest.mark.parametrize("sent", [{"type": "Unknown"}, {"row": 1}, {"type": "Admitted"}, 5, None])
def test_what_is_no_report_is_refused(sent: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_reports(messages.encode_reports([sent]))


def test_a_token_without_an_end_or_logprobs_is_sent_in_a_few_bytes() -> None:
    assert len(messages.encode_reports(Token(1, 2))) <= 6
    assert Heartbeat(0.0, 0.0).doing == messages.IDLE
