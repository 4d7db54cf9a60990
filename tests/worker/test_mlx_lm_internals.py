"""Changes in another version of mlx-lm are reported when the engine starts."""

import pytest

from mlx_server.worker import mlx_lm_internals
from mlx_server.worker.mlx_lm_internals import WrongMlxLm, check_mlx_lm


class Renamed:
    def __init__(self, model: object, rows: object) -> None: ...


def test_this_version_has_all_of_it() -> None:
    check_mlx_lm()


def test_a_method_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mlx_lm_internals.KVCache, "trim")
    with pytest.raises(WrongMlxLm, match="KVCache has no trim") as reported:
        check_mlx_lm()
    assert "pip install 'mlx-lm" in str(reported.value)


def test_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm_internals, "METHODS", {})
    monkeypatch.setattr(mlx_lm_internals, "ARGUMENTS", {Renamed: ("model", "uids")})
    with pytest.raises(WrongMlxLm, match="Renamed takes model, rows"):
        check_mlx_lm()
