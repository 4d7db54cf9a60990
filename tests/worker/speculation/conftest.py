"""The demo model's vocabulary, and the drafters that rows with it have."""

from pathlib import Path

import pytest
from bench_parts.speculation.simulated import Drafters, Tokenize
from tokenizers import Tokenizer

from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary(demo_path: Path) -> Vocabulary:
    return Vocabulary(demo_path, [2]).build()


@pytest.fixture(scope="session")
def tokenize(demo_path: Path) -> Tokenize:
    tokenizer = Tokenizer.from_file(str(demo_path / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def drafters(vocabulary: Vocabulary, tokenize: Tokenize) -> Drafters:
    return Drafters(vocabulary, tokenize)
