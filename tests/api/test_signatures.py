import base64

import pytest

from mlx_server.api.signatures import Signer

OURS, OTHER = Signer(b"a key"), Signer(b"another key")
THOUGHTS = ["", "Hm.", "世界 🙂", "x" * 10_000, "half \ud83d of one"]


@pytest.mark.parametrize("thought", THOUGHTS)
def test_a_signature_is_of_one_thought_and_one_key(thought: str) -> None:
    signature = OURS.sign(thought)
    assert signature == OURS.sign(thought)
    assert OURS.is_own(thought, signature)
    assert not OURS.is_own(thought + ".", signature)
    assert not OTHER.is_own(thought, signature)
    assert OURS.opened(signature) is None


@pytest.mark.parametrize("thought", THOUGHTS[:-1])
def test_a_sealed_thought_comes_back(thought: str) -> None:
    sealed = OURS.seal(thought)
    assert OURS.opened(sealed) == thought
    assert OURS.is_own(thought, sealed)
    assert OTHER.opened(sealed) is None
    assert sealed == OURS.seal(thought)


def test_a_sealed_thought_can_not_be_read_by_clients() -> None:
    raw = base64.b64decode(OURS.seal("a secret thought").partition(".")[2])
    assert b"secret" not in raw


def test_a_seal_is_of_one_thought() -> None:
    assert not OURS.is_own("another", OURS.seal("Hm."))


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
