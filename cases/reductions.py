"""Reductions: along rows, along columns, and to one number as for a gradient's norm."""

import pytest

from perfsuite import Reduction

# 8192 tokens of Llama-3-8B, 4096 wide (arXiv:2407.21783), and the gigabytes that a GPU needs.
SHAPES = {"8192x4096": (8192, 4096), "196608x8192": (24 * 8192, 8192)}

REDUCTIONS = [
    pytest.param("sum", 1, marks=pytest.mark.smoke, id="sum-rows"),
    pytest.param("sum", 0, id="sum-columns"),
    pytest.param("max", 1, id="max-rows"),
    pytest.param("argmax", 1, id="argmax-rows"),
    pytest.param("norm", None, id="norm"),
]


@pytest.mark.parametrize(("rows", "cols"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("op", "dim"), REDUCTIONS)
def bench_reduction(op, dim, rows, cols):
    return Reduction(op=op, rows=rows, cols=cols, dim=dim, dtype="fp32")
