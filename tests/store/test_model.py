"""The store against plain dicts: any calls, in any order, with crashes between them."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_server import limits
from mlx_server.errors import BadRequest, NotFound
from mlx_server.store import RUNNING, ItemRecord, Record, Retention, Store
from tests.store.make import items, recounted, response

DAY = 86400.0
RETENTION, COUNT = Retention(days=10), 6

owners = st.sampled_from(["", "a", "b"])
ids = st.sampled_from([f"r{n}" for n in range(8)])
conversations = st.sampled_from(["c0", "c1", "c2"])
item_ids = st.lists(st.sampled_from("ijklmn"), max_size=3, unique=True)
statuses = st.sampled_from(["queued", "in_progress", "completed", "incomplete", "failed"])

Key = tuple[str, str]


@dataclass
class Known:
    response: Record
    input: list[ItemRecord]
    events: list[bytes]
    order: int


@dataclass
class Talk:
    conversation: Record
    used_at: float
    order: int
    items: dict[str, ItemRecord] = field(default_factory=dict)


@pytest.fixture(autouse=True, scope="module")
def _few_records() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "STORED_RESPONSES", COUNT)
        yield


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp())
        self.folders = itertools.count()
        self.orders = itertools.count()
        self.path = self.root / f"{next(self.folders)}" / "store.db"
        self.now = 1000 * DAY
        self.responses: dict[Key, Known] = {}
        self.talks: dict[Key, Talk] = {}
        self.open()

    def open(self) -> None:
        self.store = self.run(Store.open(self.path, RETENTION, clock=lambda: self.now))

    def run(self, call: Any) -> Any:
        return self.runner.run(call)

    def refused(self, call: Any, error: type[Exception]) -> None:
        try:
            self.run(call)
        except error:
            return
        raise AssertionError(f"no {error.__name__}")

    @rule(
        owner=owners,
        id=ids,
        status=statuses,
        put=item_ids,
        out=item_ids,
        previous=st.none() | ids,
        talk=st.none() | conversations,
    )
    def begin(
        self,
        owner: str,
        id: str,
        status: str,
        put: list[str],
        out: list[str],
        previous: str | None,
        talk: str | None,
    ) -> None:
        if (owner, id) in self.responses:
            return
        made = response(id, status, items(*out), at=self.now, previous=previous, conversation=talk)
        self.run(self.store.add(made, owner, items(*put), [b"0"]))
        self.responses[owner, id] = Known(made, items(*put), [b"0"], next(self.orders))
        self.tell(owner, id)

    @rule(owner=owners, id=ids, status=statuses, out=item_ids, events=st.integers(0, 3))
    def put(self, owner: str, id: str, status: str, out: list[str], events: int) -> None:
        known = self.responses.get((owner, id))
        new = response(id, status, items(*out), note="put")
        said = [b"%d" % n for n in range(events)]
        changed = self.run(self.store.put(new, owner, said))
        assert changed == (known is not None and known.response.status in RUNNING)
        if known and changed:
            known.response = replace(
                known.response, status=status, body=new.body, output=new.output
            )
            known.events = said
            self.tell(owner, id, at=0)

    def tell(self, owner: str, id: str, at: float | None = None) -> None:
        known = self.responses[owner, id]
        talk = self.talks.get((owner, known.response.conversation or ""))
        if talk and known.response.status in ("completed", "incomplete"):
            talk.used_at = max(talk.used_at, self.now if at is None else at)
            for item in (*known.input, *known.response.output):
                talk.items.setdefault(item.id, item)

    @rule(owner=owners, id=ids)
    def delete(self, owner: str, id: str) -> None:
        if self.responses.pop((owner, id), None):
            self.run(self.store.delete("response", id, owner))
        else:
            self.refused(self.store.delete("response", id, owner), NotFound)

    @rule(owner=owners, id=conversations, put=item_ids)
    def create(self, owner: str, id: str, put: list[str]) -> None:
        if (owner, id) in self.talks:
            return
        made = Record("conversation", id, self.now, b"{}")
        self.run(self.store.add(made, owner, items(*put)))
        held = {item.id: item for item in items(*put)}
        self.talks[owner, id] = Talk(made, self.now, next(self.orders), held)

    @rule(owner=owners, id=conversations, put=item_ids)
    def add(self, owner: str, id: str, put: list[str]) -> None:
        talk = self.talks.get((owner, id))
        call = self.store.add_items(id, owner, items(*put), self.now)
        if talk is None:
            self.refused(call, NotFound)
        elif talk.items.keys() & set(put):
            self.refused(call, BadRequest)
        else:
            self.run(call)
            talk.items |= {item.id: item for item in items(*put)}
            talk.used_at = self.now

    @rule(owner=owners, id=conversations, item=st.sampled_from("ijklmn"))
    def delete_item(self, owner: str, id: str, item: str) -> None:
        talk = self.talks.get((owner, id))
        if talk and talk.items.pop(item, None):
            self.run(self.store.delete_item(id, owner, item))
        else:
            self.refused(self.store.delete_item(id, owner, item), NotFound)

    @rule(owner=owners, id=conversations, number=st.integers(0, 9))
    def update(self, owner: str, id: str, number: int) -> None:
        talk = self.talks.get((owner, id))
        body = b'{"n":%d}' % number
        call = self.store.update("conversation", id, owner, body, used_at=self.now)
        if talk is None:
            self.refused(call, NotFound)
        else:
            self.run(call)
            talk.conversation = replace(talk.conversation, body=body)
            talk.used_at = self.now

    @rule(owner=owners, id=conversations)
    def delete_conversation(self, owner: str, id: str) -> None:
        if self.talks.pop((owner, id), None):
            self.run(self.store.delete("conversation", id, owner))
        else:
            self.refused(self.store.delete("conversation", id, owner), NotFound)

    @rule(days=st.integers(0, 6))
    def wait(self, days: int) -> None:
        self.now += days * DAY

    @rule()
    def prune(self) -> None:
        expired = self.now - RETENTION.days * DAY
        gone = 0
        ended = [k for k, known in self.responses.items() if known.response.status not in RUNNING]
        ended.sort(key=lambda k: (self.responses[k].response.created_at, self.responses[k].order))
        for key in ended:
            too_many = len(self.responses) > COUNT
            if too_many or self.responses[key].response.created_at < expired:
                del self.responses[key]
                gone += 1
        unused = sorted(self.talks, key=lambda k: (self.talks[k].used_at, self.talks[k].order))
        for key in unused:
            if len(self.talks) > COUNT or self.talks[key].used_at < expired:
                del self.talks[key]
                gone += 1
        assert self.run(self.store.prune()) == gone

    def failed(self) -> None:
        for known in self.responses.values():
            if known.response.status in RUNNING:
                known.response = replace(known.response, status="failed", body=b"")

    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.failed()
        self.open()

    @rule()
    def crash(self) -> None:
        """The files as they lie, under a store that was not closed."""
        there = self.root / f"{next(self.folders)}"
        shutil.copytree(self.path.parent, there)
        self.run(self.store.close())
        self.path = there / "store.db"
        self.failed()
        self.open()

    @rule(owner=owners, id=ids)
    def chain(self, owner: str, id: str) -> None:
        head = self.responses.get((owner, id))
        if head and head.response.status in RUNNING:
            return self.refused(self.store.chain(id, owner), BadRequest)
        links: list[Known] = []
        wanted: str | None = id
        while wanted is not None:
            known = self.responses.get((owner, wanted))
            if known is None:
                return self.refused(self.store.chain(id, owner), NotFound)
            if known in links:  # a ring: ids were used again
                return self.refused(self.store.chain(id, owner), BadRequest)
            links.append(known)
            wanted = known.response.previous
        expected = [i for known in reversed(links) for i in (*known.input, *known.response.output)]
        assert self.run(self.store.chain(id, owner)) == expected
        return None

    @rule(owner=owners, id=ids)
    def look(self, owner: str, id: str) -> None:
        known = self.responses.get((owner, id))
        if known is None:
            return self.refused(self.store.get("response", id, owner), NotFound)
        got = self.run(self.store.get("response", id, owner))
        events, is_running = self.run(self.store.events(id, owner))
        assert is_running == (got.status in RUNNING)
        if not known.response.body:
            assert bool(events) == bool(known.events)
            assert not events or b"response.failed" in events.pop()
            body = msgspec.json.decode(got.body)
            assert (body["id"], body["status"]) == (id, "failed")
            assert "stopped before" in body["error"]["message"]
            got = replace(got, body=b"")
        assert got == known.response
        assert events == known.events
        page = self.run(self.store.items("response", id, owner, order="asc"))
        assert page.items == known.input
        return None

    @rule(owner=owners, id=conversations, limit=st.integers(1, 4), backwards=st.booleans())
    def listen(self, owner: str, id: str, limit: int, backwards: bool) -> None:
        talk = self.talks.get((owner, id))
        if talk is None:
            return self.refused(self.store.get("conversation", id, owner), NotFound)
        assert self.run(self.store.get("conversation", id, owner)) == talk.conversation
        expected = list(talk.items.values())[:: -1 if backwards else 1]
        found: list[ItemRecord] = []
        after, more = None, True
        while more:
            order = "desc" if backwards else "asc"
            page = self.run(self.store.items("conversation", id, owner, after, limit, order))
            found += page.items
            after, more = (found[-1].id if found else None), page.has_more
        assert found == expected
        return None

    @invariant()
    @precondition(lambda self: hasattr(self, "store"))
    def counts(self) -> None:
        stats = self.run(self.store.stats())
        held = sum(len(k.input) + len(k.response.output) for k in self.responses.values())
        assert stats.responses == len(self.responses)
        assert stats.conversations == len(self.talks)
        assert stats.items == held + sum(len(talk.items) for talk in self.talks.values())
        assert stats.stored == self.run(recounted(self.store))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
            self.runner.close()
            shutil.rmtree(self.root)


StoreMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=30)
TestStore = pytest.mark.slow(StoreMachine.TestCase)
