"""What each case would do on a device, by arithmetic alone: nothing is built, torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.errors import HardwareError
from perfsuite.gate import ITERATION_LIMIT_GPU_S
from perfsuite.hardware.catalogue import Hardware, ambiguity, load
from perfsuite.hardware.selection import detect
from perfsuite.measure.metric import metric_of
from perfsuite.terminal import PlanRow
from perfsuite.units import format_bytes, format_time_us, s_to_us
from perfsuite.utilization import arithmetic_intensity
from perfsuite.workloads.base import Target, Workload


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """The device that is planned for, here or not, and its data sheet where it has one."""

    target: Target
    hardware: Hardware | None


def plan_target(gpu: str) -> PlanTarget:
    """The device that ``gpu`` names, which need not be here; a HardwareError where it is unknown or ambiguous."""
    if gpu in ("auto", "cpu") or gpu.startswith("cpu-"):
        device = detect(gpu)
        target = Target(backend=device.backend, sku=device.sku, compute_capability=device.compute_capability)
        return PlanTarget(target=target, hardware=device.hardware())
    try:
        rows = load().resolve(gpu)
    except HardwareError as error:
        raise HardwareError(f"--gpu {gpu}: {error}") from None
    if len(rows) > 1:
        raise HardwareError(f"--gpu {gpu}: {ambiguity(gpu, rows)}")
    row = rows[0].per_torch_device()
    capability = row.chip.compute_capability
    backend = "rocm" if capability.startswith("gfx") else "cuda"
    return PlanTarget(target=Target(backend=backend, sku=row.sku, compute_capability=capability), hardware=row)


def plan_row(case: str, workload: Workload, planned: PlanTarget) -> PlanRow:
    """One case's work and the least time it can take on the planned device."""
    work, hardware = workload.work(), planned.hardware
    flops, nbytes = work.flops, work.nbytes
    metric = metric_of(workload, flops or 0, nbytes, backend=planned.target.backend, hardware=hardware)
    return PlanRow(
        case=case,
        flops=flops,
        nbytes=nbytes,
        arithmetic_intensity=None if flops is None else arithmetic_intensity(flops=flops, nbytes=nbytes or 0),
        bound={"mfu": "compute", "mbu": "memory"}.get(metric, "launch"),
        roofline_time_us=_roofline_time_us(workload, hardware),
        memory_bytes=workload.memory_bytes(),
        dtype=workload.dtype,
        skip=_skip(workload, planned),
    )


def _roofline_time_us(workload: Workload, hardware: Hardware | None) -> float | None:
    """The longer of computing and moving bytes; None where a needed peak is not known."""
    if hardware is None:
        return None
    work = workload.work()
    peak = hardware.flops_per_s(workload.dtype)
    if work.flops and not peak:
        return None
    compute_s = (work.flops or 0) / peak if peak else 0.0
    return s_to_us(max(compute_s, (work.nbytes or 0) / hardware.memory_bytes_per_s)) or None


def _skip(workload: Workload, planned: PlanTarget) -> str | None:
    """Why the case would be skipped."""
    if reason := workload.unsupported(planned.target):
        return reason
    needed = workload.memory_bytes()
    if needed is not None and planned.hardware is not None and needed > planned.hardware.memory_bytes:
        return f"needs {format_bytes(needed)}, the device has {format_bytes(planned.hardware.memory_bytes)}"
    time_us, limit_us = _roofline_time_us(workload, planned.hardware), s_to_us(ITERATION_LIMIT_GPU_S)
    if time_us is None or time_us <= limit_us or not workload.sized:
        return None
    return f"one iteration takes at least {format_time_us(time_us)}, the limit is {format_time_us(limit_us)}"
