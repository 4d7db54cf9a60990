"""Records can't be changed, and what is kept by default is what the settings say."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from mlx_server.config.settings import StoreSettings
from mlx_server.store import records
from mlx_server.store.records import (
    CONVERSATION_STATUSES,
    RUNNING,
    CompletionRecord,
    ConversationRecord,
    ItemRecord,
    ResponseRecord,
    Retention,
)


def test_a_store_without_settings_keeps_what_the_settings_keep_by_default() -> None:
    settings = StoreSettings()
    for field in fields(Retention):
        assert getattr(Retention(), field.name) == getattr(settings, field.name), field.name


def test_a_response_that_runs_is_in_no_conversation_yet() -> None:
    assert not RUNNING & CONVERSATION_STATUSES


@pytest.mark.parametrize(
    "record",
    [
        ItemRecord("i", b"{}"),
        ResponseRecord("r", 1.0, "completed", b"{}"),
        ConversationRecord("c", 1.0, b"{}"),
        CompletionRecord("c", 1.0, b"{}", b"{}"),
        records.Page((), has_more=False),
        Retention(),
    ],
)
def test_a_record_can_not_be_changed_after_it_was_read(record: Any) -> None:
    for field in fields(record):
        with pytest.raises(FrozenInstanceError):
            setattr(record, field.name, None)


def test_a_response_is_alone_unless_it_says_otherwise() -> None:
    alone = ResponseRecord("r", 1.0, "completed", b"{}")
    assert (alone.output, alone.previous, alone.conversation) == ((), None, None)
