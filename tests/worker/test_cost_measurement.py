"""The cost curve of a model is measured while the engine is idle, and kept on disk."""

from pathlib import Path

import pytest

from mlx_server.engine.messages import CancelRows, Generate, LoadModel
from mlx_server.requests import SamplingParams
from mlx_server.worker.cost_measurement import IDLE_SECONDS, MOST_SECONDS, STEPS
from mlx_server.worker.costs import CostCurve, Drift, MeasuredCurve
from mlx_server.worker.engine import Engine
from mlx_server.worker.prefill.schedule import DEFAULT_SCHEDULE, PrefillBudget, PrefillPiece
from tests.clocks import Clock


class Measured:
    def __init__(self, path: Path, folder: Path | None) -> None:
        self.clock = Clock(tick=0.001)
        self.engine = Engine(clock=self.clock, curves=folder, concurrency=8)
        self.engine.handle(LoadModel("m", str(path)))
        self.run_until_idle()

    def run_until_idle(self) -> None:
        while self.engine.pause is not None and self.engine.pause < IDLE_SECONDS / 2:
            self.engine.step()

    def ask(self, row: int, tokens: int = 4) -> None:
        sampling = SamplingParams(temperature=0)
        self.engine.handle(Generate(row, "m", [1, 2, 3], tokens, [], sampling))

    def passes(self) -> int:
        """Measures to the end; returns the steps that this took."""
        self.clock.now += IDLE_SECONDS
        count = 0
        while (pause := self.engine.pause) is not None:
            assert pause == 0
            self.engine.step()
            count += 1
        return count


def test_an_idle_engine_measures_once_and_the_next_reads_it(llama: Path, tmp_path: Path) -> None:
    first = Measured(llama, tmp_path)
    assert first.engine.pause == pytest.approx(IDLE_SECONDS, abs=0.1), "a request may come at once"
    assert first.passes() > 2 * len(STEPS)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert Measured(llama, tmp_path).engine.pause is None
    whole = file.read_text()
    for damaged in ('{"steps": {"1": 0}}', whole[:-9], whole.replace("0.", "1e300", 1), "[]"):
        file.write_text(damaged)
        assert Measured(llama, tmp_path).engine.pause, "a damaged file is made again"


def test_without_a_folder_nothing_is_measured(llama: Path) -> None:
    assert Measured(llama, None).engine.pause is None


def test_a_request_goes_first_and_what_was_measured_is_kept(llama: Path, tmp_path: Path) -> None:
    whole = Measured(llama, tmp_path / "a").passes()
    measured = Measured(llama, tmp_path / "b")
    measured.clock.now += IDLE_SECONDS
    for _ in range(10):
        measured.engine.step()
    measured.ask(1)
    first = measured.engine.step()
    assert any(getattr(report, "row", None) == 1 for report in first), "no pass comes before it"
    measured.engine.handle(CancelRows([1]))
    assert measured.engine.pause == pytest.approx(IDLE_SECONDS, abs=0.1)
    assert measured.passes() == whole - 10


def test_sizes_whose_passes_take_long_are_left_out(llama: Path, tmp_path: Path) -> None:
    measured = Measured(llama, tmp_path)
    measured.clock.tick = 2 * MOST_SECONDS
    assert measured.passes() == 4, "two passes of a step of one row and of a piece of one token"


def test_a_measured_curve_is_used_from_the_first_piece_on() -> None:
    pieces = {tokens: 0.1 + 0.001 * tokens for tokens in (1, 64, 256)}
    curve = MeasuredCurve({1: 0.02, 16: 0.02}, pieces)
    tokens = PrefillBudget(DEFAULT_SCHEDULE, curve).piece(0, 1, 1, 0)
    assert 350 <= tokens <= 400
    assert PrefillBudget(DEFAULT_SCHEDULE, curve).cost.seconds(PrefillPiece(1, 64, 0)) == (
        pytest.approx(0.164, rel=0.01)
    )


def test_between_its_entries_a_curve_is_a_line_and_after_them_it_goes_on() -> None:
    curve = CostCurve({1: 1.0, 2: 2.0, 4: 3.0}, {1: 1.0})
    assert [curve.step(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]


def test_a_step_that_costs_more_than_a_larger_one_is_padded_to_that() -> None:
    curve = CostCurve({1: 1.0, 8: 8.0, 9: 9.0, 10: 5.0, 32: 5.0}, {1: 1.0})
    assert [curve.padding(rows) for rows in (1, 4, 6, 9, 10, 12)] == [0, 0, 4, 1, 0, 0]
    assert curve.step(9) == 5.0


@pytest.mark.parametrize(("factor", "is_large"), [(1.0, False), (1.3, False), (2.0, True)])
def test_a_curve_is_out_of_date_when_steps_take_another_time(factor: float, is_large: bool) -> None:
    drift = Drift()
    for _ in range(40):
        drift.add(1.2)  # a step takes more than its pass
    assert not drift.is_large
    for _ in range(40):
        drift.add(1.2 * factor)
    assert drift.is_large is is_large
