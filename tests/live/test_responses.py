"""Responses that are kept: found again, gone on from, streamed again, cancelled, and lost."""

from typing import Any

from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent

from tests.live.replayed import ask, is_begun, refused
from tests.live.server import LiveServer, eventually

RUNNING = ("queued", "in_progress")


def awaited(client: OpenAI, id: str) -> Response:
    eventually(lambda: client.responses.retrieve(id).status not in RUNNING, f"the end of {id}")
    return client.responses.retrieve(id)


def numbers(events: list[ResponseStreamEvent]) -> list[int]:
    return [event.sequence_number for event in events]


def texts(page: Any) -> list[str]:
    return [item.content[0].text for item in page.data]


def test_a_response_is_found_again(client: OpenAI) -> None:
    made = ask(client, metadata={"a": "b"}, instructions="Rhyme.")
    assert made.output_text == "Roses are red."
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with refused(404):
            gone(made.id)
    with refused(404):
        client.responses.input_items.list(made.id)


def test_a_stream_is_stored_as_it_was_told(client: OpenAI) -> None:
    *_, last = ask(client, stream=True)
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_nothing_is_left_of_what_is_not_stored(client: OpenAI) -> None:
    made = ask(client, store=False)
    assert made.store is False
    with refused(404):
        client.responses.retrieve(made.id)
    with refused(400) as error:
        ask(client, previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found"


def test_a_chain(client: OpenAI, server: LiveServer) -> None:
    first = ask(client, "one", instructions="Be brief.")
    second = ask(client, "two", previous_response_id=first.id)
    third = ask(client, "three", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    assert second.instructions is None
    lengths = [made.usage.input_tokens for made in (first, second, third)]
    assert lengths[2] > lengths[1]
    reported = [*first.output, *second.output]
    anew = ask(
        client,
        [
            {"role": "user", "content": "one"},
            reported[0].to_dict(),
            {"role": "user", "content": "two"},
            reported[1].to_dict(),
            {"role": "user", "content": "three"},
        ],
    )
    assert anew.usage.input_tokens == lengths[2], "instructions are not carried over"
    client.responses.delete(first.id)
    with refused(400) as error:
        ask(client, "three", previous_response_id=second.id)
    assert error.value.code == "previous_response_not_found"
    assert error.value.param == "previous_response_id"
    assert "or one before it was deleted" in error.value.message


def test_input_items_come_in_pages(client: OpenAI) -> None:
    said = [{"role": "user", "content": f"{n}"} for n in range(5)]
    made = ask(client, said)
    items: Any = client.responses.input_items
    assert texts(items.list(made.id)) == ["4", "3", "2", "1", "0"]
    first = items.list(made.id, limit=2, order="asc")
    assert texts(first) == ["0", "1"]
    assert first.has_more
    rest = items.list(made.id, limit=3, order="asc", after=first.last_id)
    assert (texts(rest), rest.has_more) == (["2", "3", "4"], False)
    assert len(list(items.list(made.id, limit=1))) == 5, "and the client pages through them"
    with refused(400) as error:
        items.list(made.id, after="msg_none")
    assert error.value.param == "after"
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
        with refused(400):
            items.list(made.id, **wrong)


def test_a_conversation_grows(client: OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "zero"}]
    )
    first = ask(client, "one", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    second = ask(client, "two", conversation={"id": conversation.id}, stream=True)
    *_, last = second
    assert last.type == "response.completed"
    items = client.conversations.items.list(conversation.id, order="asc")
    assert texts(items) == ["zero", "one", "Yes.", "two", "Yes."]
    assert last.response.usage.input_tokens > first.usage.input_tokens
    ask(client, "three", conversation=conversation.id, store=False)
    assert len(client.conversations.items.list(conversation.id).data) == 5
    with refused(404):
        ask(client, "one", conversation="conv_none")
    with refused(400):
        ask(client, "one", conversation=conversation.id, previous_response_id=first.id)


def test_in_the_background(client: OpenAI) -> None:
    made = ask(client, "steady", background=True)
    assert (made.status, made.output) == ("queued", [])
    done = awaited(client, made.id)
    assert (done.status, done.output_text) == ("completed", "One, two, three, four.")
    assert done.background
    with refused(400):
        client.responses.retrieve(made.id, stream=True)
    with refused(400) as error:
        ask(client, background=True, store=False)
    assert error.value.param == "background"
    with refused(404):
        ask(client, background=True, model="none")


def test_a_stream_is_taken_up_at_every_event(client: OpenAI) -> None:
    with ask(client, "steady", background=True, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    id = first.response.id
    while_running = list(client.responses.retrieve(id, stream=True))
    assert numbers(while_running) == list(range(len(while_running)))
    assert [event.type for event in while_running][:3] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert while_running[-1].type == "response.completed"
    reported = [event.to_dict() for event in while_running]
    for place in range(len(reported)):
        again = client.responses.retrieve(id, stream=True, starting_after=place)
        assert [event.to_dict() for event in again] == reported[place + 1 :]
    whole = client.responses.retrieve(id)
    assert whole.to_dict() == while_running[-1].response.to_dict()


def test_cancelling(client: OpenAI, server: LiveServer) -> None:
    with ask(client, "slow", background=True, stream=True) as stream:
        events = iter(stream)
        id = next(events).response.id
        while next(events).type != "response.output_text.delta":
            pass
        running = client.responses.retrieve(id)
        assert running.status == "in_progress"
        cancelled = client.responses.cancel(id)
        *_, last = events
    assert cancelled.status == "cancelled"
    assert is_begun(cancelled)
    assert cancelled.output[0].to_dict()["status"] == "incomplete"
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.cancel(id).to_dict() == cancelled.to_dict(), "again changes nothing"
    assert client.responses.retrieve(id).to_dict() == cancelled.to_dict()
    done = ask(client)
    with refused(400):
        client.responses.cancel(done.id)
    eventually(server.idle, "rest")


def test_what_runs_is_not_gone_on_from(client: OpenAI) -> None:
    made = ask(client, "slow", background=True)
    with refused(400) as error:
        ask(client, previous_response_id=made.id)
    assert error.value.code == "previous_response_not_ended"
    client.responses.cancel(made.id)
    assert ask(client, previous_response_id=made.id).output_text == "Roses are red."
