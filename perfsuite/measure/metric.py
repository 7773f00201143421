"""Which figure a case is judged by: MFU where compute is the bound, MBU where memory is, else latency."""

from __future__ import annotations

from perfsuite.hardware.catalogue import Hardware
from perfsuite.workloads.base import Workload

NOMINAL_RIDGE = {"cpu": 8.0}
"""FLOPs per byte at which compute takes over, where there is no data sheet: fixed, so that noise cannot move a case."""
NOMINAL_RIDGE_GPU = 100.0


def metric_of(workload: Workload, flops: int, nbytes: int | None, *, backend: str, hardware: Hardware | None) -> str:
    """``mfu``, ``mbu`` or ``latency_us``; the workload's own choice comes first."""
    if workload.metric is not None:
        return workload.metric
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
