"""The line of a case that is being sampled."""

from __future__ import annotations

import math

from perfsuite.terminal.names import printable, shorten
from perfsuite.units import format_percent


def progress_line(case: str, samples: int, low: float, high: float, width: int) -> str:
    """``gemm.py::bench_gemm[bf16]  40 samples, ±1.2 %`` in at most ``width`` cells.

    ``low`` and ``high`` are the interval of ln(judged value) so far; it may still be infinite.
    """
    half = math.expm1((high - low) / 2) if math.isfinite(high - low) else None
    rest = f"  {samples} sample{'' if samples == 1 else 's'}" + ("" if half is None else f", ±{format_percent(half)}")
    room = width - len(rest)
    name = printable(case)
    return shorten(name + rest, width) if room < 1 else shorten(name, room) + rest
