"""Responses and what may befall their server: it stops, it dies, its store breaks, it has keys."""

import asyncio
import os
import signal
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from mlx_server.config.settings import STORE_FILE
from mlx_server.store import Record, Store
from tests.live.replayed import ask, refused, replaying
from tests.live.server import eventually


def test_the_last_words_of_a_server(tmp_path: Path) -> None:
    """It drains, then ends what is left; nothing is left running."""
    with replaying(tmp_path, server={"drain_seconds": 3.0}) as server:
        with server.openai() as client:
            quick = ask(client, "steady", background=True).id
            endless = ask(client, "slow", background=True, stream=True)
            events = iter(endless)
            id = next(events).response.id
            while next(events).type != "response.output_text.delta":
                pass
            server.process.send_signal(signal.SIGTERM)
            *_, last = events
            assert last.type == "response.failed"
        assert server.process.wait(20) == 0
        said = "Answers have 3 s to end; Ctrl-C again ends them at once.\n"
        assert said in server.printed
    assert stored(tmp_path, quick).status == "completed"
    failed = stored(tmp_path, id)
    assert failed.status == "failed"
    assert b'"type":"message"' in failed.output[0].body


def stored(folder: Path, id: str) -> Record:
    async def get() -> Record:
        store = await Store.open(folder / "data" / STORE_FILE)
        try:
            return await store.get("response", id, "")
        finally:
            await store.close()

    return asyncio.run(get())


def test_a_server_that_crashes_next_to_another(tmp_path: Path) -> None:
    """Both have one data directory. Clients of the other one follow, cancel and delete what the
    first one runs, until that is killed."""
    shared = tmp_path / "other" / "data"
    shared.parent.mkdir()
    shared.symlink_to(tmp_path / "data")
    with (
        replaying(tmp_path) as server,
        server.openai() as client,
        replaying(tmp_path / "other") as other,
        other.openai() as beside,
    ):
        done = ask(client, "one")
        assert ask(beside, "two", previous_response_id=done.id).output_text == "Yes."
        running = ask(client, "slow", background=True)
        with refused(400) as early:
            ask(beside, previous_response_id=running.id)
        assert early.value.code == "previous_response_not_ended"
        assert beside.responses.cancel(running.id).status == "cancelled"
        beside.responses.delete(ask(client, "slow", background=True).id)
        eventually(server.idle, "an end of what was deleted")
        running = ask(client, "slow", background=True)
        streamed = ask(client, "slow", background=True, stream=True)
        id = next(iter(streamed)).response.id
        events = iter(beside.responses.retrieve(id, stream=True))
        while next(events).type != "response.output_text.delta":
            pass
        assert beside.responses.retrieve(id).status == "in_progress"
        with ask(client, "slow", stream=True) as stream:
            foreground = next(iter(stream)).response.id
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
        *_, last = events
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert beside.responses.retrieve(done.id).to_dict() == done.to_dict()
        for lost in (running.id, id, foreground):
            ended = beside.responses.retrieve(lost)
            assert ended.status == "failed"
            assert ended.error


def test_one_key_never_sees_anothers(tmp_path: Path) -> None:
    with (
        replaying(tmp_path, server={"api_keys": ["one", "two"]}) as server,
        server.openai(api_key="one") as one,
        server.openai(api_key="two") as two,
    ):
        made = ask(one, "one")
        running = ask(one, "slow", background=True, stream=True)
        id = next(iter(running)).response.id
        conversation = one.conversations.create(items=[{"role": "user", "content": "x"}])
        with refused(404) as unknown:
            two.responses.retrieve("resp_x")
        none = str(unknown.value)
        for hidden in (made.id, id):
            for call in (
                two.responses.retrieve,
                two.responses.delete,
                two.responses.cancel,
                two.responses.input_items.list,
                lambda id: two.responses.retrieve(id, stream=True),
            ):
                with refused(404) as error:
                    call(hidden)
                assert str(error.value).replace(hidden, "resp_x") == none
            with refused(400) as wrong:
                ask(two, previous_response_id=hidden)
            assert wrong.value.code == "previous_response_not_found"
        with refused(404):
            two.conversations.retrieve(conversation.id)
        with refused(404):
            ask(two, conversation=conversation.id)
        reference = [{"type": "item_reference", "id": made.output[0].id}]
        with refused(400):
            ask(two, reference)
        running.close()
        assert one.responses.cancel(id).status == "cancelled"
        assert one.responses.retrieve(made.id).id == made.id


def test_a_store_in_trouble(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    with replaying(tmp_path) as server, server.openai() as client:
        assert ask(client, store=False).output_text == "Roses are red."
        for broken in (
            lambda: ask(client),
            lambda: ask(client, stream=True),
            lambda: ask(client, background=True),
            lambda: ask(client, store=False, previous_response_id="resp_x"),
            lambda: client.responses.retrieve("resp_x"),
            lambda: client.conversations.create(),
        ):
            with pytest.raises(openai.InternalServerError) as error:
                broken()
            assert error.value.status_code == 503
            assert error.value.code == "store_unavailable"
        (tmp_path / "data").unlink()
        eventually(lambda: is_stored(client), "a store that works again")


def is_stored(client: OpenAI) -> bool:
    try:
        return bool(ask(client).id)
    except openai.InternalServerError:
        return False
