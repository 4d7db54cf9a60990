"""The kernels of MLX 0.32 by chip, matrix and rows."""

import pytest
from bench_parts.simulated.roofline import pair, seconds

from mlx_server.worker.kernels import Chip, Product, kernel, vector_limit
from tests.tables import cases

CHIPS = {
    "m1": ("applegpu_g13g", (14, 10, 6)),
    "m1-max": ("applegpu_g13s", (14, 10, 6)),
    "m2": ("applegpu_g14g", (14, 10, 6)),
    "m2-ultra": ("applegpu_g14d", (32, 18, 12)),
    "m3-max": ("applegpu_g15s", (13, 15, 13)),
    "m3-ultra": ("applegpu_g15d", (32, 18, 12)),
    "m4": ("applegpu_g16g", (13, 15, 13)),
    "m4-pro": ("applegpu_g16s", (13, 15, 13)),
    "m5": ("applegpu_g17g", (33, 25, 13)),
    "m5-max": ("applegpu_g17s", (33, 25, 13)),
}
"""The GPU, and the limits for matrices of at most 2048, at most 4096, and more."""


def chip(name: str) -> Chip:
    known = Chip.of(CHIPS[name][0])
    assert known
    return known


@pytest.mark.parametrize("name", CHIPS)
def test_the_limits_of_each_chip(name: str) -> None:
    shapes = [(2048, 2048), (4096, 2049), (4096, 4097)]
    assert tuple(vector_limit(chip(name), *shape) for shape in shapes) == CHIPS[name][1]
    assert vector_limit(chip(name), 14336, 1024) == CHIPS[name][1][2]


def test_another_gpu_is_no_chip_of_apple() -> None:
    assert Chip.of("sm_90a") is None
    assert Chip.of("") is None


@cases
def test_the_kernel_of_a_matrix(
    name: str, mode: str, rows: int, expected: str, reads: int, computed: int
) -> None:
    found = kernel(chip(name), Product(4096, 14336, 1.0, 1.0, mode), rows)
    assert (found.name, found.reads, found.rows) == (expected, reads, computed)


EXPERTS = [
    # chip, mode, experts, used, rows -> kernel, bytes read as a share of all experts
    ("m4", "mxfp4", 32, 4, 1, "gather_qmv", 4 / 32),
    ("m4", "mxfp4", 32, 4, 8, "gather_qmv", 1.0),
    ("m4", "mxfp4", 32, 4, 31, "gather_qmv", 31 * 4 / 32),
    ("m4", "mxfp4", 32, 4, 32, "gather_qmm_rhs", 1 - 0.875**32),
    ("m1", "affine", 128, 8, 63, "gather_qmv", 63 * 8 / 128),
    ("m1", "affine", 128, 8, 64, "gather_qmm_rhs", 1 - 0.9375**64),
    ("m4", "", 32, 4, 15, "gather_mv", 15 * 4 / 32),
    ("m4", "", 32, 4, 16, "gather_mm_rhs", 1 - 0.875**16),
    ("m4", "affine", 4, 4, 15, "gather_qmv", 15.0),  # mlx-lm sorts from 64 pairs on
    ("m4", "affine", 4, 4, 16, "gather_qmm_rhs", 1.0),
]


@pytest.mark.parametrize(("name", "mode", "experts", "used", "rows", "expected", "share"), EXPERTS)
def test_the_kernel_of_experts(
    name: str, mode: str, experts: int, used: int, rows: int, expected: str, share: float
) -> None:
    product = Product(2880, 2880, 1.0, 1.0, mode, experts, used)
    found = kernel(chip(name), product, rows)
    assert (found.name, found.rows) == (expected, rows * used)
    assert found.reads == pytest.approx(share)


def test_without_known_kernels_all_rows_share_a_read() -> None:
    assert kernel(None, Product(8, 8, 1.0, 1.0), 9).reads == 1
    assert kernel(None, Product(8, 8, 1.0, 1.0, "affine", 2, 1), 2).reads == 0.75


STEPS = [("m4-pro:8b", 8, 2.05), ("m4-max:gpt-oss-20b", 8, 3.75), ("m4-max:gpt-oss-20b", 16, 6.0)]


@pytest.mark.parametrize(("named", "rows", "expected"), STEPS)
def test_a_step_of_several_rows_over_one_of_one_row(named: str, rows: int, expected: float) -> None:
    machine, model = pair(named)
    one, several = (seconds(machine, model, 1, [1000] * count) for count in (1, rows))
    assert several / one == pytest.approx(expected, rel=0.06)
