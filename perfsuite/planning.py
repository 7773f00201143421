"""What each case would do on a device, by arithmetic alone: nothing is built, torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from perfsuite.errors import CaseError, HardwareError
from perfsuite.footprint import largest_batch
from perfsuite.gate import ITERATION_LIMIT_GPU_S
from perfsuite.hardware.catalogue import Hardware, ambiguity, load
from perfsuite.hardware.selection import detect
from perfsuite.measure.metric import BOUNDS, bounds_s, metric_of
from perfsuite.measure.sampler import MIN_SAMPLES
from perfsuite.terminal import PlanRow
from perfsuite.units import format_bytes, format_time_us, s_to_us
from perfsuite.utilization import arithmetic_intensity
from perfsuite.workloads.base import Target, Workload

NOTABLE = 0.01
"""Parts below this share of the memory are left out of a reason."""


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """The device that is planned for, here or not, and its data sheet where it has one."""

    target: Target
    family: str
    hardware: Hardware | None


def plan_target(gpu: str) -> PlanTarget:
    """The device that ``gpu`` names, which need not be here; a HardwareError where it is unknown or ambiguous."""
    if gpu in ("auto", "cpu") or gpu.startswith("cpu-"):
        device = detect(gpu)
        target = Target(backend=device.backend, sku=device.sku, compute_capability=device.compute_capability)
        return PlanTarget(target=target, family=device.family, hardware=device.hardware())
    try:
        rows = load().resolve(gpu)
    except HardwareError as error:
        raise HardwareError(f"--gpu {gpu}: {error}") from None
    if len(rows) > 1:
        raise HardwareError(f"--gpu {gpu}: {ambiguity(gpu, rows)}")
    row = rows[0].per_torch_device()
    capability = row.chip.compute_capability
    backend = "rocm" if capability.startswith("gfx") else "cuda"
    target = Target(backend=backend, sku=row.sku, compute_capability=capability)
    return PlanTarget(target=target, family=row.family, hardware=row)


def plan_row(case: str, workload: Workload, planned: PlanTarget, *, budget_s: float) -> PlanRow:
    """One case's work, the least time it can take on the planned device, its memory; ``budget_s`` is for sampling."""
    work, hardware = workload.work(), planned.hardware
    flops, nbytes, parts = work.flops, work.nbytes, workload.memory_parts()
    metric = metric_of(workload, flops or 0, nbytes, backend=planned.target.backend, hardware=hardware)
    bounds = {} if hardware is None else bounds_s(work, workload.dtype, hardware, ranks=workload.group_size()) or {}
    time_us, memory_bytes = s_to_us(max(bounds.values(), default=0.0)) or None, workload.memory_bytes()
    return PlanRow(
        case=case,
        flops=flops,
        nbytes=nbytes,
        arithmetic_intensity=None if flops is None else arithmetic_intensity(flops=flops, nbytes=nbytes or 0),
        bound=BOUNDS[metric] if metric == "latency_us" else _bound(bounds, otherwise=BOUNDS[metric]),
        roofline_time_us=time_us,
        memory_bytes=memory_bytes,
        memory_parts=parts,
        largest_batch=_largest_batch(workload, hardware) if parts and hardware is not None else None,
        dtype=workload.dtype,
        skip=workload.unsupported(planned.target)
        or _too_large(memory_bytes, parts, hardware)
        or (_too_slow(time_us, budget_s) if workload.sized else None),
    )


def _bound(bounds: Mapping[str, float], *, otherwise: str) -> str:
    """What takes the longest at its peak; ``otherwise`` where peaks are not known."""
    return max(bounds, key=lambda name: bounds[name]) if any(bounds.values()) else otherwise


def _largest_batch(workload: Workload, hardware: Hardware) -> int | None:
    """The largest batch of a workload that has one, by its memory alone; None where it has none, or not even 1 fits."""
    if all(field.name != "batch" for field in fields(workload)):
        return None

    def needed(batch: int) -> int | None:
        try:
            return replace(workload, batch=batch).memory_bytes()  # type: ignore[call-arg]  # it has the field
        except CaseError:  # the workload does not take every batch
            return None

    return largest_batch(needed, int(hardware.memory_bytes))


def _too_large(needed: int | None, parts: Mapping[str, int], hardware: Hardware | None) -> str | None:
    """Why the case's memory passes the device's."""
    if needed is None or hardware is None or needed <= hardware.memory_bytes:
        return None
    by_part = f" ({_by_part(parts)})" if len(parts) > 1 else ""
    return f"needs {format_bytes(needed)}{by_part}, the device has {format_bytes(hardware.memory_bytes)}"


def _by_part(parts: Mapping[str, int]) -> str:
    """``parameters 13.0, gradients 13.0 GiB``: what makes up the most of it, the unit once where all share it."""
    least = NOTABLE * sum(parts.values())
    texts = {name.replace("_", " "): format_bytes(size) for name, size in parts.items() if size >= least}
    units = {text.partition(" ")[2] for text in texts.values()}
    if len(units) > 1:
        return ", ".join(f"{name} {text}" for name, text in texts.items())
    return ", ".join(f"{name} {text.partition(' ')[0]}" for name, text in texts.items()) + f" {units.pop()}"


def _too_slow(time_us: float | None, budget_s: float) -> str | None:
    """Why one iteration passes the limit, which a budget that holds enough longer iterations raises."""
    limit_us = s_to_us(max(ITERATION_LIMIT_GPU_S, budget_s / MIN_SAMPLES))
    if time_us is None or time_us <= limit_us:
        return None
    return f"one iteration takes at least {format_time_us(time_us)}, the limit is {format_time_us(limit_us)}"
