"""The device as a worker holds it, and the ceilings that it has measured so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from perfsuite.hardware.catalogue import Hardware
from perfsuite.measure import ceiling
from perfsuite.measure.clock import Clock
from perfsuite.measure.control import Control, control_for, loopback_control, memmove_control, read_control
from perfsuite.measure.group import Group
from perfsuite.measure.measurement import CeilingSample, ControlSummary
from perfsuite.workloads.base import Target

LOOPBACK_PROBE = 4 * 1024**2
WIDENED = ("bf16", "fp16")
"""Data types that a CPU without units for them computes in fp32, often faster than its own routines do."""


@dataclass(kw_only=True)
class Bench:
    """The device as a worker holds it: where torch builds, its clock, its data sheet, and ceilings measured so far."""

    torch_device: str
    target: Target
    clock: Clock
    hardware: Hardware | None = None
    l2_bytes: int | None = None
    read_device_conditions: Callable[[], dict[str, Any]] | None = None
    group: Group | None = None
    """The ranks that measure together with this one; the clock is then theirs too."""
    ceilings: dict[str, CeilingSample] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks measure together."""
        return self.group.size if self.group is not None else 1

    @property
    def has_control(self) -> bool:
        """Controls run where torch computes on the host's cores."""
        return self.target.backend == "cpu"


def compute_rate(dtype: str, bench: Bench) -> float | None:
    """Operations per second that matmuls in ``dtype`` reach: the data sheet's peak, or what was measured here."""
    return bench.hardware.flops_per_s(dtype) if bench.hardware else probed_compute(dtype, bench).rate_per_s


def memory_rate(bench: Bench) -> float | None:
    """Bytes per second of large sizes: the data sheet's, or what was measured here."""
    return bench.hardware.memory_bytes_per_s if bench.hardware else measured_memory(bench).rate_per_s


def probed_compute(dtype: str, bench: Bench) -> CeilingSample:
    """The best rate of a data type's matmuls, probed when first asked for: torch's own, or numpy's if faster."""
    key = ceiling.compute_key(dtype)
    if key not in bench.ceilings:
        best = ceiling.probe_compute(dtype, bench.torch_device, bench.clock)
        if bench.has_control and dtype in ceiling.NUMPY_DTYPES:
            control = control_for(metric="mfu", flops=2 * 1024**3, nbytes=None, dtype=dtype)
            best = ceiling.better(best, ceiling.probe_control(control, key=key, clock=bench.clock))
        bench.ceilings[key] = best
    return bench.ceilings[key]


def measured_compute(dtype: str, bench: Bench) -> CeilingSample:
    """The measured ceiling of a data type.

    On a CPU bf16 and fp16 are held against fp32's as well: torch's attention and its compiler compute them with fp32's
    units, 15 times as fast as bf16 matmuls on a CPU that has none for them.
    """
    own = probed_compute(dtype, bench)
    if not (bench.has_control and dtype in WIDENED):
        return own
    wide = probed_compute("fp32", bench)
    return ceiling.better(own, ceiling.as_key(wide, own.key))


def measured_memory(bench: Bench) -> CeilingSample:
    """The measured memory rate for large sizes, probed when first asked for."""
    if "memory" not in bench.ceilings:
        if bench.has_control:
            control = control_for(metric="mbu", flops=0, nbytes=64 * 1024**2, dtype="fp32")
            bench.ceilings["memory"] = ceiling.probe_control(control, key="memory", clock=bench.clock)
        else:
            bench.ceilings["memory"] = ceiling.probe_memory(bench.torch_device, bench.clock)
    return bench.ceilings["memory"]


def offered_ceilings(
    bench: Bench,
    *,
    metric: str,
    dtypes: Iterable[str],
    nbytes: int | None,
    control: Control | None,
    summary: ControlSummary | None,
) -> tuple[CeilingSample, ...]:
    """What an attempt offers as measured ceilings, one for each data type it computes in; none beside a data sheet."""
    if bench.hardware is not None:
        return ()
    if metric == "mfu":
        return tuple(_compute_ceiling(bench, dtype, control, summary) for dtype in dtypes)
    if control is None or summary is None:
        return (measured_memory(bench),) if metric == "mbu" else ()
    if metric == "mbu":
        return (_memory_ceiling(bench, nbytes or 0, control, summary),)
    if metric != "latency_us" or control.unit == "B":  # a loopback's bytes bound no calls
        return ()
    return (ceiling.from_control(control, summary.rate_per_s, key=ceiling.CALLS_KEY),)


def loopback_rate(bench: Bench) -> float:
    """Bytes per second that a socket of this host takes from a process and gives it back, probed once."""
    key = "loopback"
    if key not in bench.ceilings:
        bench.ceilings[key] = ceiling.probe_control(loopback_control(LOOPBACK_PROBE), key=key, clock=bench.clock)
    return bench.ceilings[key].rate_per_s


def _memory_ceiling(bench: Bench, nbytes: int, control: Control, summary: ControlSummary) -> CeilingSample:
    """The best of moving and of reading as many bytes, probed once per size, and of memmove beside this case."""
    key, clock = ceiling.memory_key(nbytes), bench.clock
    if key not in bench.ceilings:
        reading, moving = (
            ceiling.probe_control(probe(nbytes), key=key, clock=clock) for probe in (read_control, memmove_control)
        )
        bench.ceilings[key] = ceiling.better(reading, moving)
    if control.unit != "B":
        return bench.ceilings[key]
    return ceiling.better(bench.ceilings[key], ceiling.from_control(control, summary.rate_per_s, key=key))


def _compute_ceiling(
    bench: Bench, dtype: str, control: Control | None, summary: ControlSummary | None
) -> CeilingSample:
    """The best of what was probed and of the control beside this case, where that is a GEMM in its data type."""
    best = measured_compute(dtype, bench)
    if control is None or summary is None or control.unit != "FLOP" or dtype not in ceiling.NUMPY_DTYPES:
        return best
    return ceiling.better(best, ceiling.from_control(control, summary.rate_per_s, key=best.key))
