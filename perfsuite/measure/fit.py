"""Whether a case fits a device at all, with the arithmetic where it does not."""

from __future__ import annotations

from perfsuite.measure.bench import Bench, compute_rate, loopback_rate, memory_rate
from perfsuite.units import format_bytes, format_si, format_time_us, s_to_us
from perfsuite.workloads.base import Work, Workload


def why_skip(
    workload: Workload, work: Work, bench: Bench, *, memory_free_bytes: int | None, iteration_limit_s: float
) -> str | None:
    """The reason, with its arithmetic, why the case does not fit this device; None where it does."""
    if reason := workload.unsupported(bench.target):
        return f"{bench.target.sku}: {reason}"
    needed = workload.memory_bytes()
    if needed is not None and memory_free_bytes is not None and needed > memory_free_bytes:
        free = format_bytes(memory_free_bytes)
        return f"needs {format_bytes(needed)} of memory, {bench.target.sku} has {free} free for it"
    return _too_slow(workload, work, bench, iteration_limit_s) if workload.sized else None


def _too_slow(workload: Workload, work: Work, bench: Bench, limit_s: float) -> str | None:
    """Why one iteration would pass the limit by the roofline; None where it would not, or nothing is known."""
    if work.wire_bytes and bench.has_control:
        return _too_far(work.wire_bytes, bench, limit_s)
    split = dict(work.flops_by_dtype) or {workload.dtype: work.flops or 0}
    rates = {dtype: compute_rate(dtype, bench) for dtype, flops in split.items() if flops}
    compute_s = sum(split[dtype] / (bench.ranks * rate) for dtype, rate in rates.items() if rate)
    bandwidth = memory_rate(bench)
    memory_s = work.nbytes / (bench.ranks * bandwidth) if work.nbytes and bandwidth else 0.0
    if max(compute_s, memory_s) <= limit_s:
        return None
    amount, rate = (
        (format_si(work.flops or 0, "FLOP"), format_si((work.flops or 0) / compute_s, "FLOP/s"))
        if compute_s >= memory_s
        else (format_si(work.nbytes or 0, "B"), format_si(bandwidth or 0, "B/s"))
    )
    return (
        f"one iteration takes at least {format_time_us(s_to_us(max(compute_s, memory_s)))} ({amount} at {rate}), "
        f"the limit is {format_time_us(s_to_us(limit_s))}"
    )


def _too_far(wire_bytes: int, bench: Bench, limit_s: float) -> str | None:
    """Why the bytes that a CPU's collective moves take longer than the limit, however they are moved."""
    rate = loopback_rate(bench)
    if wire_bytes / rate <= limit_s:
        return None
    return (
        f"one iteration takes at least {format_time_us(s_to_us(wire_bytes / rate))} "
        f"({format_bytes(wire_bytes)} at {format_si(rate, 'B/s')} of the loopback), "
        f"the limit is {format_time_us(s_to_us(limit_s))}"
    )
