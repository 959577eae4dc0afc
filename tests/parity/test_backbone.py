"""Tensor, sequence, expert, pipeline and data parallelism and ZeRO equal one process.

Bounds, fp32: losses and norms 1e-5 relative, every weight 1e-5 absolute after three steps; clipping is always
active, AdamW's eps is 1e-4 (gradients of zero up to rounding do not become steps of full size). Measured
differences are in docs/parity.md, which `python tests/parity/table.py` writes.
"""

import pytest
from parity.backbone import FULL, PAIRWISE, Row, compare


def check(row: Row) -> None:
    found = compare(row)
    assert found.loss < 1e-5 and found.norm < 1e-5 and found.weight < 1e-5, found


@pytest.mark.parametrize("row", PAIRWISE, ids=str)
def test_layout_equals_one_process(row: Row) -> None:
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in FULL if row not in PAIRWISE], ids=str)
def test_every_layout_equals_one_process(row: Row) -> None:
    check(row)
