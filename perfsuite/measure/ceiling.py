"""Measured ceilings, for devices whose data sheet is not in the catalogue: the best rate seen, labelled so."""

from __future__ import annotations

import math

import msgspec

from perfsuite.dtypes import dtype_of
from perfsuite.measure.clock import Clock, Step, seconds_per_iteration
from perfsuite.measure.control import Control
from perfsuite.measure.measurement import CeilingSample

PROBE_SIZES = (128, 256, 512, 1024)
PROBE_LIMIT_S = 0.02
PROBE_REPEATS = 5
PROBE_BYTES = 256 * 1024**2
NUMPY_DTYPES = ("fp32", "fp64")
CALLS_KEY = "calls"


def compute_key(dtype: str) -> str:
    """The key under which rates of a data type are compared."""
    return f"compute.{dtype}"


def memory_key(nbytes: int) -> str:
    """The key under which memory rates are compared: those of one size, since caches make small sizes faster."""
    return f"memory.{nbytes}"


def from_control(control: Control, rate_per_s: float, *, key: str) -> CeilingSample:
    """A control's own rate as the ceiling of ``key``."""
    return CeilingSample(
        key=key, rate_per_s=rate_per_s, unit=f"{control.unit}/s", detail=f"{control.name} {control.version}"
    )


def as_key(sample: CeilingSample, key: str) -> CeilingSample:
    """The same rate as the ceiling of another ``key``."""
    return msgspec.structs.replace(sample, key=key)


def better(one: CeilingSample, other: CeilingSample) -> CeilingSample:
    """The higher of two ceilings; one that was not measured (NaN) never wins."""
    return other if other.rate_per_s > one.rate_per_s or math.isnan(one.rate_per_s) else one


def best_seconds(step: Step, clock: Clock) -> float:
    """The shortest of a few calls of ``step``, after one that warms up."""
    step()
    return min(seconds_per_iteration(clock.time(step, 1), 1) for _ in range(PROBE_REPEATS))


def probe_control(control: Control, *, key: str, clock: Clock) -> CeilingSample:
    """A control's best rate as the ceiling of ``key``."""
    return from_control(control, control.work / best_seconds(control.step, clock), key=key)


def probe_compute(dtype: str, device: str, clock: Clock) -> CeilingSample:
    """The best rate of torch's square matmuls in ``dtype``: sizes grow until one takes longer than PROBE_LIMIT_S."""
    from perfsuite.workloads.gemm import Gemm

    best, detail = 0.0, ""
    for size in PROBE_SIZES:
        seconds = best_seconds(Gemm(m=size, n=size, k=size, dtype=dtype).build(device), clock)
        if 2 * size**3 / seconds > best:
            best, detail = 2 * size**3 / seconds, f"torch.matmul[{size},{dtype}]"
        if seconds > PROBE_LIMIT_S:
            break
    return CeilingSample(key=compute_key(dtype), rate_per_s=best, unit=f"{dtype_of(dtype).unit}/s", detail=detail)


def probe_memory(device: str, clock: Clock) -> CeilingSample:
    """The best rate of a large device copy, bytes read and bytes written counted."""
    from perfsuite.workloads.memory import Copy

    seconds = best_seconds(Copy(nbytes=PROBE_BYTES).build(device), clock)
    return CeilingSample(key="memory", rate_per_s=2 * PROBE_BYTES / seconds, unit="B/s", detail="torch copy 256 MiB")
