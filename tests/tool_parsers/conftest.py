"""Fixtures of more than one file here."""

import pytest

from tests.tool_parsers.heard import Heard


@pytest.fixture
def heard() -> Heard:
    return Heard()
