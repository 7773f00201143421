"""Which figure a case is judged by: MFU where compute bounds it, MBU where memory does, bus bandwidth, latency."""

from __future__ import annotations

from perfsuite.hardware.catalogue import Hardware
from perfsuite.utilization import Part, ideal_time_s
from perfsuite.workloads.base import Work, Workload

NOMINAL_RIDGE = {"cpu": 8.0}
"""FLOPs per byte at which compute takes over, where there is no data sheet: fixed, so that noise cannot move a case."""
NOMINAL_RIDGE_GPU = 100.0


def metric_of(workload: Workload, flops: int, nbytes: int | None, *, backend: str, hardware: Hardware | None) -> str:
    """``mfu``, ``mbu``, ``busbw_utilization`` or ``latency_us``; the workload's own choice comes first."""
    chosen = workload.judged_by()
    if chosen is not None:
        return chosen
    if not flops:
        return "mbu" if nbytes else "latency_us"
    if not nbytes:
        return "mfu"
    return "mfu" if flops / nbytes >= ridge(workload.dtype, backend=backend, hardware=hardware) else "mbu"


def ridge(dtype: str, *, backend: str, hardware: Hardware | None) -> float:
    """The roofline's ridge in FLOPs per byte: the data sheet's, or a nominal one."""
    if hardware is not None:
        peak, bandwidth = hardware.flops_per_s(dtype), hardware.memory_bytes_per_s
        if peak and bandwidth:
            return peak / bandwidth
    return NOMINAL_RIDGE.get(backend, NOMINAL_RIDGE_GPU)


def bounds_s(work: Work, dtype: str, hardware: Hardware, *, ranks: int = 1) -> dict[str, float] | None:
    """The least seconds of computing, each data type at its own peak, of moving bytes in memory, and over the links of
    one node, by what bounds; None where a peak is not known. ``ranks`` devices share the work."""
    split = dict(work.flops_by_dtype) or {dtype: work.flops or 0}
    peaks = {name: hardware.flops_per_s(name) for name, flops in split.items() if flops}
    parts = [Part(flops=split[name], peak_flops_per_s=peak) for name, peak in peaks.items() if peak]
    if len(parts) < len(peaks):
        return None
    link_bytes_per_s = hardware.link_bytes_per_s
    return {
        "compute": ideal_time_s(parts) / ranks,
        "memory": (work.nbytes or 0) / (ranks * hardware.memory_bytes_per_s),
        "link": work.wire_bytes / link_bytes_per_s if work.wire_bytes and link_bytes_per_s else 0.0,
    }


BOUNDS = {"mfu": "compute", "mbu": "memory", "busbw_utilization": "link", "latency_us": "launch"}
"""What holds a case back, by the figure that it is judged by."""


def judged_work(metric: str, *, flops: float, nbytes: float | None, wire_bytes: float, calls: float) -> float:
    """The work whose rate is judged: FLOPs, bytes of memory, bytes on the wire, or calls."""
    judged = {"mfu": flops, "mbu": nbytes or 0.0, "busbw_utilization": wire_bytes}
    return float(judged.get(metric, calls))
