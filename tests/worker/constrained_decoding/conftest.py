"""An engine for grammars, and vocabularies of two kinds."""

from pathlib import Path

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.engine import Engine
from tests.worker.constrained_decoding.grammars import loaded
from tests.worker.constrained_decoding.worlds import World


@pytest.fixture
def engine(tiny_path: Path) -> Engine:
    return loaded(tiny_path)


@pytest.fixture(scope="session")
def demo(demo_path: Path) -> World:
    known = Vocabulary(demo_path, [2]).build()
    return World(known.text, known.control, known.trie, 2)


@pytest.fixture(scope="session")
def bytewise() -> World:
    class Tokens:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<|answer|>", b"<|call|>")
        special_token_ids = (256, 257, 258)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tree = LLTokenizer(TokenizerWrapper(Tokens()), eos_token=[256])
    control = {256: "<|end|>", 257: "<|answer|>", 258: "<|call|>"}
    return World([*Tokens.tokens[:256], b"", b"", b""], control, tree, 256)
