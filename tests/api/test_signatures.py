import base64
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlx_server.config.settings import StoreSettings
from mlx_server.http.security import Signer, secret_key
from tests.api import wire

OURS, OTHER = Signer(b"a key"), Signer(b"another key")
IGNORED = "x-mlx-server-ignored"
THOUGHTS = ["", "Hm.", "世界 🙂", "x" * 10_000, "half \ud83d of one"]


@pytest.mark.parametrize("thought", THOUGHTS)
def test_a_signature_and_a_seal_are_of_one_thought_and_one_key(thought: str) -> None:
    signature, sealed = OURS.sign(thought), OURS.seal(thought)
    assert (signature, sealed) == (OURS.sign(thought), OURS.seal(thought))
    assert OURS.is_own(thought, signature)
    assert OURS.opened(signature) is None
    for made in (signature, sealed):
        assert not OURS.is_own(thought + ".", made)
        assert not OTHER.is_own(thought, made)
    assert OTHER.opened(sealed) is None
    if "half" not in thought:
        assert OURS.opened(sealed) == thought
        assert OURS.is_own(thought, sealed)


def test_a_sealed_thought_can_not_be_read_by_clients() -> None:
    raw = base64.b64decode(OURS.seal("a secret thought").partition(".")[2])
    assert b"secret" not in raw


@pytest.mark.parametrize("kind", ["sign", "seal"])
def test_no_letter_of_it_can_be_changed(kind: str) -> None:
    signature: str = getattr(OURS, kind)("Hm.")
    for at in range(len(signature) - 2):  # the last two have bits that mean nothing
        other = "A" if signature[at] != "A" else "B"
        changed = signature[:at] + other + signature[at + 1 :]
        assert not OURS.is_own("Hm.", changed)
        assert OURS.opened(changed) is None


@pytest.mark.parametrize(
    "signature", ["", "x", "mlx1.", "mlx3.", "mlx1.é", "mlx3.A", "mlx3.AAAA", "mlx3.\ud800"]
)
def test_what_is_no_signature_of_ours(signature: str) -> None:
    assert not OURS.is_own("Hm.", signature)
    assert OURS.opened(signature) is None


def test_keys_are_told_apart() -> None:
    mine, yours = OURS.of("mine"), OURS.of("yours")
    for other in (yours, OURS.of(""), OURS, OTHER.of("mine")):
        assert other.opened(mine.seal("Hm.")) is None
        assert not other.is_own("Hm.", mine.sign("Hm."))
    assert OURS.of("mine").opened(mine.seal("Hm.")) == "Hm."


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> wire.ScriptedEngine:
    monkeypatch.setattr(wire, "TEXT", "<think>Between us.</think>So.")
    return wire.ScriptedEngine()


def thought_of(client: TestClient, key: str) -> str:
    """A sealed thought, as a response has it."""
    body = {"model": wire.MODEL, "input": "hi", "include": ["reasoning.encrypted_content"]}
    headers = {"authorization": f"Bearer {key}"}
    response = wire.ok(client.post("/v1/responses", json=body, headers=headers))
    return str(response["output"][0]["encrypted_content"])


@pytest.mark.parametrize("by", ["one", "other"])
def test_what_is_sealed_for_one_key_opens_in_no_other_ones_prompt(
    by: str, tiny_path: Path, engine: wire.ScriptedEngine
) -> None:
    keys = tuple(map(wire.key, ("one", "other")))
    said = [{"role": "user", "content": "hi"}]
    with wire.client(tiny_path, engine, api_keys=keys) as client:

        def post(path: str, key: str, **body: Any) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}"}
            return client.post(path, json={"model": wire.MODEL, **body}, headers=headers)

        sealed = thought_of(client, "one")
        item = {"type": "reasoning", "encrypted_content": sealed}
        ignored = post("/v1/responses", by, input=[*said, item, *said]).headers.get(IGNORED)
        assert ignored == (None if by == "one" else "input.encrypted_content")
        thinking = {"type": "thinking", "thinking": "", "signature": sealed}
        turns = [*said, {"role": "assistant", "content": [thinking]}, *said]
        ignored = post("/v1/messages/count_tokens", by, messages=turns).headers.get(IGNORED)
        assert ignored == (None if by == "one" else "messages.content.signature")


def test_who_reads_the_folder_and_has_no_key_opens_nothing(
    tmp_path: Path, tiny_path: Path, engine: wire.ScriptedEngine
) -> None:
    store = StoreSettings(data_dir=tmp_path)
    with wire.client(tiny_path, engine, store, api_keys=(wire.key("one"),)) as client:
        sealed = thought_of(client, "one")
    signer = Signer(secret_key(tmp_path))
    (file,) = tmp_path.glob("*.sqlite3")
    with closing(sqlite3.connect(file)) as db:
        owners = {owner for (owner,) in db.execute("SELECT owner FROM records")}
    assert owners - {""}
    assert [signer.of(owner).opened(sealed) for owner in owners] == [None] * len(owners)
