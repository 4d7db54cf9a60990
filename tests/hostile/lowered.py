"""Limits that a test lowers, so that less is needed to pass them."""

from dataclasses import replace

import pytest

from mlx_server import limits


def lower(patched: pytest.MonkeyPatch, name: str, value: float) -> None:
    patched.setattr(limits, name, replace(getattr(limits, name), value=value))
