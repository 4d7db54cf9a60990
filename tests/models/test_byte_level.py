"""Tokenizers of checkpoints without a tokenizer.json: the same ids as their own libraries make."""

import json
import random
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers

from mlx_server.errors import ModelUnusable
from mlx_server.models.byte_level import KIMI_PIECES, kimi_tokenizer
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.prompts.harmony.vocabulary import shipped
from mlx_server.sources.tokenizer_files import tokenizer_json

KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {
        "4000": {"content": "[BOS]", "special": True},
        "4003": {"content": "<|im_end|>", "special": True},
        "4011": {"content": "<|tool_call_begin|>", "special": False},
    },
}
LETTERS = "abcXYZ ÄßéЖя中文字漢 ひカ한글\n\t\r  1234,.!?'s're\u0301🙂👩‍👩‍👧🇩🇪\u00a0\u200b٣४ǅʰª々〇"


def texts() -> list[str]:
    drawn = random.Random(1)
    written = Path(__file__).read_text("utf-8").replace("<|", "<").replace("[BOS]", "")
    lengths = [drawn.randrange(80) for _ in range(500)]
    return [written, *("".join(drawn.choices(LETTERS, k=length)) for length in lengths)]


def kimi(folder: Path, tokens: int = 4000) -> Path:
    """Kimi's own is on no registry; the first tokens of another one are a vocabulary as well."""
    folder.mkdir(exist_ok=True)
    lines = shipped().splitlines()[:tokens]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(KIMI))
    return folder


def by_ranks(text: bytes, ranks: dict[bytes, int]) -> list[int]:
    """As tiktoken does: of all neighbours, those go together first that make the lowest rank."""
    parts = [bytes([byte]) for byte in text]
    while True:
        made = [(ranks.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
        found = min((m for m in made if m[0] is not None), default=None)
        if found is None:
            return [ranks[part] for part in parts]
        at = found[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_kimi_s_ids_are_those_of_its_ranks(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "kimi")
    made = kimi_tokenizer(folder / "tiktoken.model", KIMI)
    lines = (line.split() for line in (folder / "tiktoken.model").read_bytes().splitlines())
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI_PIECES), "isolated")
    for text in texts():
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        expected = [id for piece in pieces for id in by_ranks(piece.encode(), ranks)]
        assert made.encode(text, add_special_tokens=False).ids == expected
        assert made.decode(expected) == text


def test_kimi_s_special_tokens_have_their_ids_and_names(tmp_path: Path) -> None:
    made = Tokenizer(tokenizer_json(kimi(tmp_path / "kimi")))
    assert made.id_of("[BOS]") == 4000
    assert made.id_of("<|reserved_token_4001|>") == 4001
    assert made.encode("a<|im_end|>")[-1] == 4003
    assert made.id_of("<|tool_call_begin|>") == 4011
    assert made.vocabulary == 4256
    assert 4011 in made.control_tokens


@pytest.mark.parametrize(
    ("body", "config", "says"),
    [
        (b"not base64! 1\n", KIMI, "damaged"),
        (b"YQ== 0\nYg== 2\n", KIMI, "leave gaps"),
        (b"YQ==\n", KIMI, "damaged"),
        (b"YQ== 0\n", {}, "for Kimi models alone"),
    ],
)
def test_a_damaged_or_unknown_vocabulary(
    tmp_path: Path, body: bytes, config: dict[str, object], says: str
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(body)
    with pytest.raises(ModelUnusable, match=says):
        kimi_tokenizer(tmp_path / "tiktoken.model", config)
